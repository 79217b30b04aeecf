"""Slots for snapshots: two, a third while one is written to storage, none where memory is short."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmover.errors import SnapshotSkipped
from trainmover.protocol.messages import SnapshotTaken, Version
from trainmover.protocol.snapshot_image import FREE, OLDEST, WAITING, WRITING
from trainmover.worker import snapshot_slots
from trainmover.worker.slot_files import FilePlan, SlotFiles
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


def short(folder: str, reserve: int = 1 << 50, timeout_s: float = 30.0) -> SlotFiles:
    """As on a machine that has less memory left than is to be left alone."""
    return SlotFiles(
        FilePlan(reserve_bytes=reserve, disk_directory=folder, disk_timeout_s=timeout_s)
    )


def test_no_memory_and_no_disk_is_said_with_figures() -> None:
    files = short("")
    with pytest.raises(SnapshotSkipped, match=r"101 MiB wanted, \d+ MiB available"):
        SnapshotSlots(files).choose(100 << 20)


def test_short_memory_goes_to_disk_and_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    files = short(str(tmp_path / "disk"))
    files.say = said.append
    slots = SnapshotSlots(files)
    first, second = take(slots, 10, OLDEST), take(slots, 20)
    assert first.is_on_disk and second.is_on_disk
    first.memory[:4] = b"data"
    slots.settle(first)
    (text,) = said
    assert "goes to disk" in text and "the step waits" in text and "MiB wanted" in text
    assert os.pread(first.fd, 4, 0) == b"data"
    assert list((tmp_path / "disk").iterdir()) == [], "it has no name"
    slots.close()


def test_a_disk_that_is_no_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    slots = SnapshotSlots(short(str(tmp_path / "file" / "below")))
    with pytest.raises(SnapshotSkipped, match="can't take it either"):
        slots.choose(SIZE)


def test_memory_is_reserved_before_it_is_written(slots: SnapshotSlots) -> None:
    slot = slots.choose(8 << 20)
    assert not slot.is_on_disk
    assert os.fstat(slot.fd).st_blocks * 512 >= 8 << 20
