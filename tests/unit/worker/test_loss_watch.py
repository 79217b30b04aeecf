"""When a logged loss is doubted: not finite, stuck; and when it counts as unstable."""

from __future__ import annotations

import random
from statistics import median

from trainmover.worker.loss_watch import LEAST, SPIKE, UNSTABLE_STEPS, WINDOW, LossWatch


def logged(watch: LossWatch, step: int, value: float, name: str = "loss") -> None:
    watch.log(step, {name: value.hex()})


def test_a_value_that_is_not_finite_counts_until_a_finite_one_is_logged() -> None:
    watch = LossWatch(0)
    logged(watch, 0, 1.0)
    assert watch.doubt == ""
    logged(watch, 1, float("nan"))
    assert watch.doubt == "non_finite" and "step 1 logged loss = nan" in watch.text
    watch.log(2, {"tokens": "100"})
    assert watch.doubt == "" and watch.is_unstable
    logged(watch, 3, float("-inf"), "train_loss")
    assert watch.doubt == "non_finite"


def test_what_follows_without_any_log_stays_suspect() -> None:
    watch = LossWatch(0)
    logged(watch, 5, float("inf"))
    assert watch.doubt == "non_finite"
    watch.log(5, {"lr": "0.1"})
    assert watch.doubt == "non_finite", "another value of the same step takes nothing back"


def test_the_same_loss_again_and_again_is_stuck() -> None:
    watch = LossWatch(5)
    for step in range(5):
        logged(watch, step, 2.5)
        assert watch.doubt == ""
    logged(watch, 5, 2.5)
    assert watch.doubt == "stuck"
    logged(watch, 6, 2.25)
    logged(watch, 7, 2.0)
    assert watch.doubt == ""


def test_a_jump_is_unstable_for_a_while_and_noise_is_not() -> None:
    draw = random.Random(3)
    watch = LossWatch(0)
    for step in range(200):
        logged(watch, step, 2.0 + 0.2 * draw.random())
        assert not watch.is_unstable, step
    logged(watch, 200, 9.0)
    logged(watch, 201, 2.0)
    assert watch.is_unstable
    for step in range(202, 202 + UNSTABLE_STEPS):
        logged(watch, step, 2.0 + 0.2 * draw.random())
    assert not watch.is_unstable


def test_an_attempt_that_is_undone_and_repeated_counts_once() -> None:
    watch = LossWatch(3)
    for step in range(2):
        for _ in range(10):
            logged(watch, step, 1.5)
    assert watch.doubt == ""


def test_the_short_way_out_changes_no_verdict() -> None:
    """Most losses are told apart from a jump by the median alone."""
    seed, recent = random.Random(3), list[float]()
    watch = LossWatch(0)
    for step in range(400):
        value = (-1) ** (step > 200) * (2.0 + seed.gauss(0.0, 10.0 ** seed.randint(-6, 0)))
        if len(recent) >= LEAST:
            middle = median(recent)
            spread = max(median(abs(each - middle) for each in recent), 1e-3 * abs(middle))
            assert watch._is_spike(value) == (value > middle + SPIKE * spread)
        logged(watch, 2 * step, value)
        watch.log(2 * step + 1, {})
        recent = [*recent, value][-WINDOW:]
