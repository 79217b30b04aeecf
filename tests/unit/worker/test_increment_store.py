"""Increments that are held: one unbroken line per rank, bounded, its memory used again."""

from __future__ import annotations

import pytest

from trainmover.errors import StateMismatch
from trainmover.protocol.messages import Version
from trainmover.state.increment import Block, IncrementHead
from trainmover.worker.increment_lines import IN_FLIGHT
from trainmover.worker.increment_store import Increment, IncrementStore

OWNER = 3


def update(step: int, lineage: int = 1, base_lineage: int | None = None) -> Increment:
    """Of `step`, that passed its gate in generation `lineage`."""
    base = lineage if base_lineage is None else base_lineage
    head = IncrementHead(
        owner_rank=OWNER,
        base=Version(step=step, lineage=base),
        version=Version(step=step + 1, lineage=lineage),
        bulk_bytes=8,
    )
    return Increment(head, Block(8))


def filled(first: int, end: int, kept: int = 10) -> IncrementStore:
    store = IncrementStore(kept)
    for step in range(first, end):
        store.add(update(step))
    return store


def steps(line: tuple[Increment, ...]) -> list[int]:
    return [each.head.base.step for each in line]


def test_a_line_is_told_from_its_begin() -> None:
    store = filled(2, 6)
    assert store.begin_of(OWNER, Version(step=6, lineage=1)) == Version(step=2, lineage=1)
    assert store.begin_of(OWNER, Version(step=5, lineage=1)) == Version(step=2, lineage=1)
    assert store.begin_of(OWNER, Version(step=6, lineage=2)) is None
    assert store.begin_of(OWNER, Version(step=7, lineage=1)) is None
    assert store.begin_of(OWNER + 1, Version(step=6, lineage=1)) is None


def test_only_so_many_are_kept_and_fewer_are_promised() -> None:
    store = filled(0, 30, kept=6)
    assert steps(store.line(OWNER)) == list(range(24, 30))
    begin = store.begin_of(OWNER, Version(step=30, lineage=1))
    assert begin is not None
    assert begin.step == 24 + IN_FLIGHT
    store.add(update(30))  # the owner is a gate ahead: what was promised is there still
    assert steps(store.path(OWNER, begin, Version(step=30, lineage=1))) == list(range(26, 30))


def test_a_step_that_is_repeated_takes_the_place_of_its_attempt() -> None:
    store = filled(0, 5)
    store.add(update(4, lineage=2, base_lineage=1))
    store.add(update(5, lineage=2))
    assert steps(store.line(OWNER)) == [0, 1, 2, 3, 4, 5]
    assert store.begin_of(OWNER, Version(step=6, lineage=2)) == Version(step=0, lineage=1)
    assert store.begin_of(OWNER, Version(step=5, lineage=1)) is None


def test_what_does_not_continue_the_line_begins_it_anew() -> None:
    store = filled(0, 5)
    store.add(update(7))
    assert steps(store.line(OWNER)) == [7]
    store.add(update(8, lineage=3))
    assert steps(store.line(OWNER)) == [8]


def test_a_path_with_a_gap_is_refused() -> None:
    store = filled(4, 8)
    at = Version(step=8, lineage=1)
    assert steps(store.path(OWNER, Version(step=5, lineage=1), at)) == [5, 6, 7]
    assert store.path(OWNER, at, at) == ()
    with pytest.raises(StateMismatch, match="from step 2 to 8"):
        store.path(OWNER, Version(step=2, lineage=1), at)
    with pytest.raises(StateMismatch):
        store.path(OWNER, Version(step=5, lineage=0), at)
    with pytest.raises(StateMismatch):
        store.path(OWNER, Version(step=5, lineage=1), Version(step=9, lineage=1))


def test_steps_that_never_were_are_forgotten() -> None:
    store = filled(0, 6)
    store.drop_above(4, OWNER + 1)
    assert len(store.line(OWNER)) == 6
    store.drop_above(4)
    assert steps(store.line(OWNER)) == [0, 1, 2, 3]
    store.keep_only({OWNER + 1})
    assert store.line(OWNER) == ()


def test_memory_is_used_again() -> None:
    store = IncrementStore(3)
    blocks = set()
    for step in range(12):
        item = update(step)
        block = store.reserve(8)
        blocks.add(id(block.tensor.untyped_storage().data_ptr()))
        store.add(Increment(item.head, block))
    assert len({each.block for each in store.line(OWNER)}) == 3
    assert store.reserve(8).memory.nbytes == 8
