"""Slots for snapshots: two, a third while one is written to storage, none where memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmover.errors import SnapshotSkipped
from trainmover.protocol.messages import SnapshotTaken, Version
from trainmover.protocol.snapshot_image import FREE, OLDEST, WAITING, WRITING
from trainmover.worker import snapshot_slots
from trainmover.worker.snapshot_slots import Slot, SnapshotSlots

SIZE = 100_000


@pytest.fixture
def slots() -> Iterator[SnapshotSlots]:
    made = SnapshotSlots()
    yield made
    made.close()


def taken(step: int) -> SnapshotTaken:
    return SnapshotTaken(
        incarnation="w",
        rank=0,
        version=Version(step=step, lineage=1),
        generation=1,
        identity="id",
        path="",
        size_bytes=SIZE,
        bulk_digest=0,
        blocked_s=0.0,
        level=1,
    )


def take(slots: SnapshotSlots, step: int, hold: int = WAITING) -> Slot:
    slot = slots.choose(SIZE)
    slots.claim(slot, taken(step))
    slot.image.set_hold(hold)
    return slot


def test_two_slots_are_used_by_turns_as_the_agent_frees_them(slots: SnapshotSlots) -> None:
    first, second = take(slots, 10, OLDEST), take(slots, 20)
    assert first is not second
    first.image.set_hold(FREE)
    assert take(slots, 30) is first


def test_a_snapshot_that_comes_too_soon_is_left_out(slots: SnapshotSlots) -> None:
    take(slots, 10, OLDEST)
    take(slots, 20)
    with pytest.raises(SnapshotSkipped, match="steps 10, 20 are not complete"):
        slots.choose(SIZE)


def test_what_is_never_complete_is_given_up_but_not_the_oldest(
    slots: SnapshotSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(slots, 10, OLDEST)
    second = take(slots, 20)
    monkeypatch.setattr(snapshot_slots, "GIVE_UP_S", -1.0)
    assert slots.choose(SIZE) is second


def test_one_that_is_written_to_storage_gets_a_slot_more(slots: SnapshotSlots) -> None:
    take(slots, 10, WRITING)
    take(slots, 20, OLDEST)
    third = take(slots, 30)
    assert third.taken == taken(30)
    with pytest.raises(SnapshotSkipped):
        slots.choose(SIZE)


def test_a_durable_one_has_a_slot_more_and_the_last_word_is_never_left_out(
    slots: SnapshotSlots,
) -> None:
    first, second = take(slots, 10, OLDEST), take(slots, 20)
    third = slots.choose(SIZE, level=2)
    slots.claim(third, taken(30))
    with pytest.raises(SnapshotSkipped):
        slots.choose(SIZE, level=2)
    assert slots.choose(SIZE, level=3) is second
    assert first.taken == taken(10)


def test_state_that_has_grown_gets_larger_memory(slots: SnapshotSlots) -> None:
    first = take(slots, 10, FREE)
    larger = slots.choose(first.size + 1)
    assert larger is not first
    assert larger.size > first.size


def test_an_agent_that_comes_back_hears_of_everything_it_may_need(slots: SnapshotSlots) -> None:
    take(slots, 10, FREE)
    take(slots, 20, OLDEST)
    take(slots, 30)
    assert [one.version.step for one in slots.told()] == [20, 30]


def test_no_memory_is_said_with_figures(
    slots: SnapshotSlots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 1000000 kB\nMemAvailable: 300000 kB\n")
    monkeypatch.setattr(snapshot_slots, "MEMORY_FILE", str(told))
    with pytest.raises(SnapshotSkipped, match="293 MiB available on this machine"):
        slots.choose(100 << 20)
