"""Data after a restart: every sample once, at the corners of epochs and at another world size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact, ledger
from tests.cases.lives import SLACK, chain, kill_behind, life, run_on
from tests.cases.runs import undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PER_EPOCH = 63
"""Batches of an epoch of one rank: 1000 samples in sixteens, the last batch half full."""
CORNERS = [
    epoch * PER_EPOCH + batch
    for epoch in range(3)
    for batch in (0, 1, PER_EPOCH // 2, PER_EPOCH - 1, PER_EPOCH)
]
EPOCHS = 3 * PER_EPOCH + SLACK


def corners(count: int, seed: int) -> list[int]:
    """`count` of the 15, each of another place in an epoch, in the order of steps."""
    chosen = random.Random(seed).sample(sorted(set(CORNERS) - {0}), count)
    return sorted(chosen)


@pytest.mark.long
def test_c42_killed_at_some_corners(tmp_path: Path) -> None:
    """C42: one of the 15 points, from a printed seed; all of them in the long form."""
    seed = 46
    places = corners(1, seed)
    print(f"seed {seed}: killed behind steps {places}")
    of = places[-1] + SLACK
    chain(tmp_path, places, steps=of, machines=1)
    assert_exact(tmp_path / "out", undisturbed((), of, 1), ranks=1, steps=of)


@pytest.mark.long
def test_c42_killed_at_all_corners(tmp_path: Path) -> None:
    """C42: epochs 0, 1, 2 at their first, second, middle, last but one and last batch."""
    chain(tmp_path, sorted(set(CORNERS) - {0}), steps=EPOCHS, machines=1)
    assert_exact(tmp_path / "out", undisturbed((), EPOCHS, 1), ranks=1, steps=EPOCHS)


@pytest.mark.long
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("loader", ["plain", "stateful"])
def test_c44_at_the_end_of_an_epoch(loader: str, workers: str, tmp_path: Path) -> None:
    """C44: at the last batch, before and after the next epoch has begun, then two more epochs."""
    arguments = ("--samples", "160", "--loader", loader, "--workers", workers)
    if loader == "stateful" and workers != "0":
        pytest.skip("augmentation of torchdata's own workers is exact only if seeded by sample")
    chain(tmp_path, [10, 20], *arguments, steps=20 + SLACK, machines=1)
    expected = undisturbed(arguments, 20 + SLACK, 1)
    assert_exact(tmp_path / "out", expected, ranks=1, steps=20 + SLACK)


@pytest.mark.long
def test_c46_five_times_in_one_epoch(tmp_path: Path) -> None:
    """C46: at 30, 40, 41, 41 again without progress, and 77 of 100 batches."""
    arguments = ("--samples", "1600")
    steps = 77 + SLACK
    chain(tmp_path, [30, 40, 41, 41, 77], *arguments, steps=steps, machines=1)
    assert_exact(tmp_path / "out", undisturbed(arguments, steps, 1), ranks=1, steps=steps)


def resized(folder: Path, *arguments: str) -> str:
    """2, 3 and again 2 ranks within one epoch of 768 samples; what the last life has printed."""
    wanted = ("--samples", "768", "--validate", *arguments)
    kill_behind(life(folder, 12, *wanted, steps=12 + SLACK), folder / "two", folder, 12)
    # Held in front of step 25, which the last life does not make.
    three = life(folder, 4, *wanted, steps=16 + SLACK, machines=3, place=16)
    kill_behind(three, folder / "three", folder, 16)
    result, checks = run_on(life(folder, 100, *wanted, steps=25), folder / "again")
    assert "3 ranks became 2, so the numbers are no longer those" in result.output
    assert "each sample once" in result.output
    (check,) = checks
    assert "1 of 1 validation results bit for bit" in check.text, check
    steps = ledger(folder / "out")
    assert sorted(steps) == list(range(25))
    assert [len(steps[step]) for step in range(25)] == [32] * 12 + [48] * 4 + [32] * 9
    epoch = [index for step in range(22) for index in steps[step]]
    assert sorted(epoch) == list(range(768))
    following = [index for step in range(22, 25) for index in steps[step]]
    assert len(set(following)) == 3 * 32
    return result.output


def test_another_world_size_reads_each_sample_once(tmp_path: Path) -> None:
    """B9, P3: the rest of the epoch is dealt out anew, twice; the state gives the same results."""
    resized(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [("--loader", "stateful"), ("--workers", "2", "--spread", "fsdp2")],
    ids=["stateful", "workers-fsdp2"],
)
def test_another_world_size_of_other_kinds(arguments: tuple[str, ...], tmp_path: Path) -> None:
    resized(tmp_path, *arguments)
