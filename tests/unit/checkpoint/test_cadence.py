"""When a checkpoint is due, what that costs, and how it is written in the settings (B6, B12)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.checkpoint.cadence import (
    Adaptive,
    AnyOf,
    Budget,
    CadenceState,
    Denser,
    EveryMinutes,
    EverySteps,
    Never,
    Policy,
    cost,
    daly_interval_s,
    defaults_for,
    young_interval_s,
)
from trainmover.checkpoint.cadence_text import FORMS, parse_cadence
from trainmover.errors import ConfigError

START = CadenceState(
    step=1000,
    now_s=10_000.0,
    last_save_step=900,
    last_save_s=9_000.0,
    save_cost_s=20.0,
    blocked_s=2.0,
    save_bytes=10**12,
    elapsed_s=86_400.0,
    step_s=10.0,
)


def after(seconds: float, steps: int = 1) -> CadenceState:
    """So long after the last save."""
    return replace(START, now_s=9_000.0 + seconds, step=900 + steps)


def due_times(policy: Policy, *, steps: int, step_s: float = 10.0, **fields: object) -> list[int]:
    """Steps at which a job that saves when told would save."""
    state = replace(START, step=0, now_s=0.0, last_save_step=0, last_save_s=0.0, **fields)  # type: ignore[arg-type]
    saved = []
    for step in range(1, steps + 1):
        state = replace(state, step=step, now_s=step * step_s)
        if policy.is_due(state):
            saved.append(step)
            state = replace(state, last_save_step=step, last_save_s=state.now_s)
    return saved


def test_every_steps() -> None:
    assert due_times(EverySteps(50), steps=160) == [50, 100, 150]
    resumed = replace(START, step=49, last_save_step=15)
    assert not EverySteps(50).is_due(resumed)
    assert EverySteps(50).is_due(replace(resumed, step=51)), "50 was missed"


def test_every_minutes() -> None:
    assert due_times(EveryMinutes(5), steps=95) == [30, 60, 90]


def test_never_twice_at_one_step() -> None:
    """A step that is repeated after an interruption is not saved again by the clock."""
    assert not EveryMinutes(1).is_due(after(1000, steps=0))
    assert not Adaptive().is_due(after(1e9, steps=0))


def test_a_budget_of_time() -> None:
    """2 s blocked at 1 percent: every 200 s."""
    policy = Budget(blocked_share=0.01)
    assert not policy.is_due(after(199))
    assert policy.is_due(after(200))
    assert cost(policy, START).blocked_share == pytest.approx(0.01)


def test_a_budget_of_bytes() -> None:
    """1 TB at 4 TB per hour: every 15 minutes."""
    policy = Budget(terabytes_per_hour=4)
    assert policy.interval_s(START) == 900
    assert cost(policy, START).terabytes_per_hour == pytest.approx(4)
    both = Budget(terabytes_per_hour=4, blocked_share=0.001)
    assert both.interval_s(START) == 2000


def test_published_examples() -> None:
    """B12: 30 s blocked every 30 min is 1.7 %, every 5 min 10 %."""
    blocked = replace(START, blocked_s=30.0)
    assert cost(EveryMinutes(30), blocked).blocked_share == pytest.approx(0.01667, abs=1e-4)
    assert cost(EveryMinutes(5), blocked).blocked_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("mean_h", "cost_s", "minutes"),
    [(1.8, 20, 8.3), (0.45, 1, 0.94), (0.45, 20, 4.0), (0.45, 60, 6.7), (0.233, 20, 2.8)],
)
def test_daly(mean_h: float, cost_s: float, minutes: float) -> None:
    """Intervals known from the exact renewal form, to its printed digits."""
    assert daly_interval_s(cost_s, mean_h * 3600) / 60 == pytest.approx(minutes, abs=0.06)


@given(cost_s=st.floats(0.01, 1000), mean_s=st.floats(60, 1e6))
def test_daly_stays_between_its_bounds(cost_s: float, mean_s: float) -> None:
    interval = daly_interval_s(cost_s, mean_s)
    assert 0 < interval <= max(mean_s, 1.2 * young_interval_s(cost_s, mean_s))


def test_adaptive_follows_the_failures() -> None:
    policy = Adaptive(shortest_s=1, longest_s=1e6)
    calm, stormy = replace(START, failures=0), replace(START, failures=50)
    assert policy.interval_s(stormy) < policy.interval_s(calm)
    assert policy.interval_s(replace(stormy, save_cost_s=5000.0)) == 5000, "saves don't overlap"
    unmeasured = replace(START, save_cost_s=0.0, blocked_s=0.0)
    assert policy.interval_s(unmeasured) == 60, "the first one is early, to be measured"


def test_denser_at_the_beginning_and_in_trouble() -> None:
    policy = Denser(dense=EverySteps(10), normal=EverySteps(100), first_steps=30)
    assert due_times(policy, steps=220) == [10, 20, 100, 200]
    unstable = replace(START, step=1010, last_save_step=1000, loss_is_unstable=True)
    assert policy.is_due(unstable)
    assert not policy.is_due(replace(unstable, loss_is_unstable=False))


def test_any_of() -> None:
    assert due_times(AnyOf((EverySteps(40), EveryMinutes(5))), steps=70) == [30, 40, 70]
    assert not AnyOf((Never(),)).is_due(after(1e9))


@pytest.mark.parametrize(
    ("count", "minutes", "increments", "is_per_machine"),
    [
        (8, 15, False, False),
        (31, 15, False, False),
        (32, 120, True, False),
        (256, 120, True, False),
        (257, 45, False, True),
        (65536, 45, False, True),
    ],
)
def test_defaults_by_scale(
    count: int, minutes: float, increments: bool, is_per_machine: bool
) -> None:
    """B6; denser in the first steps."""
    found = defaults_for(count)
    settled = replace(START, step=10_000)
    assert found.full.interval_s(settled) == 60 * minutes
    assert found.full.interval_s(START) < 60 * minutes
    assert (found.increments != Never()) is increments
    if increments:
        assert found.increments.interval_s(settled) <= 600
    assert found.is_per_machine is is_per_machine
    assert found.backups == EverySteps(50)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("every 50 steps", EverySteps(50)),
        ("Every 1 Step", EverySteps(1)),
        ("every 30 min", EveryMinutes(30)),
        ("every 90s", EveryMinutes(1.5)),
        ("every 2 hours", EveryMinutes(120)),
        ("budget 2%", Budget(blocked_share=0.02)),
        ("budget 1.5 TB/h", Budget(terabytes_per_hour=1.5)),
        ("adaptive", Adaptive()),
        ("never", Never()),
        ("every 50 steps or every 30 min", AnyOf((EverySteps(50), EveryMinutes(30)))),
        (
            "every 100 steps until step 2000, then adaptive",
            Denser(dense=EverySteps(100), normal=Adaptive(), first_steps=2000),
        ),
    ],
)
def test_settings(text: str, policy: Policy) -> None:
    assert parse_cadence(text) == policy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "every",
        "every 0 steps",
        "every -1 steps",
        "every 5 lightyears",
        "budget 0%",
        "budget 100%",
        "budget",
        "often",
        "every 5 steps and more",
        "every 0 min",
    ],
)
def test_bad_settings_say_what_is_possible(text: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_cadence(text)
    assert FORMS in str(found.value) or "cadence: expected" in str(found.value)
