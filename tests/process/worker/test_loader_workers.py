"""Batches of loaders with worker processes: the same promises as in one process, and no leak."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from tests.unit.worker.loader_kinds import (
    BATCH,
    Augmented,
    Numbers,
    built,
    interrupted,
    moved,
    plain_kinds,
    stateful_kinds,
    step,
    undisturbed,
)
from tests.waiting import eventually
from torch.utils.data import DataLoader

from trainmover.errors import TrackError
from trainmover.worker.batches import Batches

FRESH: dict[str, Any] = {"num_workers": 2}
KEPT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
CHOSEN = ("shuffle", "own_generator", "replacement", "eager", "distributed", "no_batching")
KINDS = {
    **{f"{kind}_fresh": make for kind, make in plain_kinds(**FRESH).items() if kind in CHOSEN},
    **{f"{kind}_kept": make for kind, make in plain_kinds(**KEPT).items() if kind in CHOSEN},
    **{
        f"{kind}_fresh": make
        for kind, make in stateful_kinds(**FRESH).items()
        if kind in ("stateful_shuffle", "stateful_generator", "stateful_stock_sampler")
    },
}
KINDS |= {
    f"augmented_{name}": lambda options=options: DataLoader(
        Augmented(), batch_size=BATCH, shuffle=True, **options
    )
    for name, options in (("fresh", FRESH), ("kept", KEPT))
}
STEPS = 9
PLACES = {1, 3, 5, 6, 7}


@pytest.fixture(autouse=True)
def no_process_left() -> Any:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    _, alive = psutil.wait_procs(
        [c for c in psutil.Process().children(recursive=True) if c.pid not in before], timeout=10
    )
    assert not [child for child in alive if "resource_tracker" not in command_of(child)]


def command_of(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline())
    except psutil.NoSuchProcess:
        return "resource_tracker, or gone"


@pytest.mark.parametrize("kind", KINDS)
def test_undone_steps_see_the_same_batches_and_numbers(kind: str) -> None:
    assert interrupted(KINDS[kind], STEPS) == undisturbed(KINDS[kind], STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_joiner_goes_on_exactly_from_each_position(kind: str) -> None:
    expected = undisturbed(KINDS[kind], STEPS)
    for place in sorted(PLACES):
        assert moved(KINDS[kind], STEPS, {place}) == expected, f"moved at step {place}"


@pytest.mark.parametrize("kind", ["shuffle_fresh", "shuffle_kept", "own_generator_kept"])
def test_several_moves_in_one_epoch(kind: str) -> None:
    assert moved(KINDS[kind], STEPS, PLACES) == undisturbed(KINDS[kind], STEPS)


def test_augmentation_does_not_depend_on_how_many_processes_read() -> None:
    """A batch's random numbers are its own: two workers, or one, draw the same for it."""

    def read(workers: int) -> list[list[float]]:
        torch.manual_seed(11)
        loader = DataLoader(Augmented(), batch_size=BATCH, num_workers=workers)
        batches = Batches(loader)
        found = [next(batches).tolist() for _ in range(STEPS)]
        batches.close()
        return found

    assert read(2) == read(1)


def test_workers_are_shut_down_and_come_back() -> None:
    batches = built(KINDS["shuffle_kept"])
    before = len(psutil.Process().children())
    step(batches)
    assert len(psutil.Process().children()) == before + 2
    batches.close()
    eventually(lambda: len(psutil.Process().children()) == before, "they have ended")
    step(batches)
    batches.close()
    eventually(lambda: len(psutil.Process().children()) == before, "they have ended again")


def test_a_sampler_that_draws_all_along_is_refused() -> None:
    from tests.unit.worker.loader_kinds import LazyDraws

    loader = DataLoader(Numbers(), batch_size=BATCH, sampler=LazyDraws(), num_workers=2)
    batches = Batches(loader)
    with pytest.raises(TrackError, match="in the middle of an epoch"):
        for _ in range(3):
            next(batches)
    batches.close()
