"""Memory files for this process's snapshots: at most three, reused as the agent allows.

Decides which slot the next snapshot goes to. The agent says by each slot's hold word what it still
needs: the oldest version it holds is perhaps the only one that all ranks have and is never
overwritten; a newer one is waited for, and given up when it is not complete everywhere in time; one
that is being written to storage gets a slot more. So a snapshot that comes too soon is left out
instead of destroying one that is needed.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Final

from trainmover.errors import SnapshotSkipped
from trainmover.protocol.messages import SnapshotTaken
from trainmover.protocol.snapshot_image import FREE, WAITING, WRITING, SnapshotImage
from trainmover.state.snapshot import ImageWriter
from trainmover.units import MIB
from trainmover.worker.slot_files import FilePlan, SlotFiles

DURABLE: Final = 2
EMERGENCY: Final = 3
"""Levels of a snapshot, see `SnapshotTaken.level`."""
USUAL_SLOTS: Final = 2
MOST_SLOTS: Final = 3
GIVE_UP_S: Final = 60.0
"""A version that is not complete on all ranks after this long may be overwritten."""
SLACK_BYTES: Final = 1 * MIB
"""For small leaves and descriptions that grow."""


@dataclass
class Slot:
    """One memory file."""

    fd: int
    memory: mmap.mmap
    image: SnapshotImage
    writer: ImageWriter
    taken: SnapshotTaken | None = None
    taken_s: float = 0.0
    is_on_disk: bool = False
    """Memory was short: the step waits until it is written."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.memory)


class SnapshotSlots:
    """The slots of one process; they outlive each entry of `main`."""

    def __init__(self, files: SlotFiles | None = None) -> None:
        self._slots: list[Slot] = []
        self.files = files or SlotFiles(FilePlan())

    def choose(self, size: int, level: int = 1) -> Slot:
        """A slot of at least `size` bytes that may be written. Raises SnapshotSkipped.

        For a durable checkpoint there is one more, and the last word of a job that is about to be
        interrupted (level 3) takes any but the oldest.
        """
        for slot in self._slots:
            if self._is_free(slot) and slot.size >= size:
                return slot
        for slot in [slot for slot in self._slots if self._is_free(slot)]:
            self._close(slot)  # too small: state has grown
        if len(self._slots) < self._limit(level):
            return self._open(size)
        old = min(self._slots, key=lambda slot: slot.taken_s)
        for slot in self._slots:
            is_late = time.monotonic() - slot.taken_s > GIVE_UP_S or level >= EMERGENCY
            if slot.image.hold == WAITING and is_late and slot is not old and slot.size >= size:
                return slot
        versions = ", ".join(str(slot.taken.version.step) for slot in self._slots if slot.taken)
        raise SnapshotSkipped(
            f"the snapshots of steps {versions} are not complete on all machines yet; this one is "
            "left out. Take snapshots less often (snapshot.cadence) if this is said often"
        )

    @staticmethod
    def _is_free(slot: Slot) -> bool:
        return slot.taken is None or slot.image.hold == FREE

    def _limit(self, level: int) -> int:
        if level >= DURABLE:
            return MOST_SLOTS
        is_writing = any(slot.image.hold == WRITING for slot in self._slots)
        return MOST_SLOTS if is_writing else USUAL_SLOTS

    def _open(self, size: int) -> Slot:
        wanted = size + SLACK_BYTES
        fd, is_on_disk = self.files.open(wanted)
        memory = mmap.mmap(fd, wanted)
        memory.madvise(mmap.MADV_DONTFORK)
        slot = Slot(fd, memory, SnapshotImage(memory), ImageWriter(memory), is_on_disk=is_on_disk)
        self._slots.append(slot)
        return slot

    def settle(self, slot: Slot) -> None:
        """Behind the writing: wait for a slot on disk. Raises SnapshotSkipped, OSError."""
        if not slot.is_on_disk:
            return
        try:
            self.files.settle(slot.fd)
        except (SnapshotSkipped, OSError):
            self._slots.remove(slot)  # not closed: a call that hangs still uses it
            raise

    def _close(self, slot: Slot) -> None:
        self._slots.remove(slot)
        os.close(slot.fd)  # the mapping goes with its last view

    def claim(self, slot: Slot, taken: SnapshotTaken) -> None:
        """The slot holds this snapshot from now on, until the agent says otherwise."""
        slot.image.set_hold(WAITING)
        slot.taken = taken
        slot.taken_s = time.monotonic()

    def told(self) -> tuple[SnapshotTaken, ...]:
        """What an agent that has just come up must hear again, oldest first."""
        held = [slot for slot in self._slots if slot.taken and slot.image.hold != FREE]
        return tuple(slot.taken for slot in sorted(held, key=lambda s: s.taken_s) if slot.taken)

    def close(self) -> None:
        """Let go of all memory."""
        for slot in list(self._slots):
            self._close(slot)
