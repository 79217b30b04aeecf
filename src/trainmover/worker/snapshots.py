"""Snapshots of one rank: when they are asked for, how they are taken, how one is loaded.

Decides on rank 0 when the cadence asks for one (the gate then tells all ranks), and that a snapshot
stands exactly at a boundary, behind the gate that asked for it, of state that nothing invented has
touched. What becomes of it is the agent's; which version is restored is the controller's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from trainmover.errors import SnapshotSkipped, StateMismatch, TrackError
from trainmover.protocol.messages import LossAlarm, SnapshotFailed, SnapshotTaken, Version
from trainmover.protocol.snapshot_image import (
    HEADER_BYTES,
    ImageDescription,
    ImageEntry,
    aligned,
    encode_description,
)
from trainmover.state.manifest import StateManifest
from trainmover.state.snapshot import ReadEntry, image_entries, load_entries
from trainmover.worker.personal import Personal, decode, encode
from trainmover.worker.snapshot_slots import DURABLE, EMERGENCY

if TYPE_CHECKING:
    from trainmover.worker.snapshot_slots import SnapshotSlots
    from trainmover.worker.stepper import Stepper

NONE: Final = 0
LAST: Final = EMERGENCY
"""Level of the snapshot that a job ends with: nothing newer will come in its place."""


class SharedLeaves(msgspec.Struct, frozen=True, kw_only=True):
    """What an image holds beside bulk and the rank's own leaves."""

    manifest: StateManifest
    smalls: tuple[tuple[str, bytes], ...]
    """Leaves that are equal on all ranks."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SharedLeaves)


def decode_shared(data: bytes) -> SharedLeaves:
    """Raises StateMismatch."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StateMismatch(f"shared leaves of a snapshot can't be read: {error}") from error


class Snapshots:
    """Taking and loading, on the main thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._asked = NONE
        self._last: tuple[Version, bool] | None = None
        """Version of the last one taken, and whether a checkpoint was to come of it."""
        self._is_suspect = False
        self._values: tuple[tuple[str, str], ...] = ()
        self._told: set[type[Exception]] = set()

    # ------------------------------------------------------------------ when

    def wanted(self) -> int:
        """In front of a gate: level of the snapshot due behind it. Cadences are rank 0's."""
        stepper = self._stepper
        if stepper.is_shadow or stepper.host.snapshots is None:
            return NONE
        due = stepper.host.snapshots.due(stepper.version.step + 1) if stepper.rank == 0 else NONE
        return max(due, int(stepper.increments.wants_snapshot()))

    def ask(self, level: int, *, is_suspect: bool) -> None:
        """The gate has passed with this level: take one at the next whole boundary."""
        self._asked = max(self._asked, level)
        self._is_suspect = is_suspect
        if level:
            self._stepper.increments.snapshot_asked()

    @property
    def is_loss_doubted(self) -> bool:
        """Whether what this rank has logged lately speaks against its state."""
        side = self._stepper.host.snapshots
        return side is not None and bool(side.loss.doubt)

    def logged(self, values: Mapping[str, str]) -> None:
        """The script has logged something; a loss that has just become doubtful is told."""
        stepper, side = self._stepper, self._stepper.host.snapshots
        if side is None or stepper.is_shadow:
            return
        before = side.loss.doubt
        side.loss.log(stepper.step_index, values)
        doubt = side.loss.doubt
        if not doubt or doubt == before:
            return
        stepper.host.tell(
            LossAlarm(
                incarnation=stepper.host.incarnation,
                rank=stepper.rank,
                version=stepper.version,
                kind=doubt,
                text=side.loss.text,
            )
        )
        stepper.logbook.finding(
            "loss", f"{side.loss.text}: state that is saved while this lasts is suspect"
        )

    # ------------------------------------------------------------------ taking

    def take_last(self) -> None:
        """Behind the loop, at its boundary: what the job ends with is saved, whatever the cadence.

        Not where it has been for this version, as in front of a finish gate that is repeated.
        """
        stepper, side = self._stepper, self._stepper.host.snapshots
        if side is None or stepper.is_shadow or not side.keeping.checkpoint.is_on:
            return
        if stepper.version.step > 0 and self._last != (stepper.version, True):
            self.ask(LAST, is_suspect=self.is_loss_doubted)
            self.take_if_asked()

    def take_if_asked(self) -> None:
        """At a boundary that has been captured."""
        stepper = self._stepper
        if not self._asked or stepper.parts_done or stepper.host.snapshots is None:
            return
        level, self._asked = self._asked, NONE
        stepper.host.snapshots.asked(stepper.version.step, level)
        try:
            if stepper.broken_state:
                raise SnapshotSkipped(stepper.broken_state)
            self._is_suspect = self._is_suspect or self.is_loss_doubted
            self._values = stepper.restored.values()
            taken = self._take(level, stepper.host.snapshots.slots)
        except (SnapshotSkipped, TrackError, OSError) as error:
            self._failed(error)
            return
        self._last = (stepper.version, level >= DURABLE)
        stepper.host.snapshots.taken(taken)
        stepper.host.tell(taken)
        if stepper.rank == 0 and (news := stepper.host.snapshots.news(taken.incarnation)):
            stepper.host.tell(news)

    def _take(self, level: int, slots: SnapshotSlots) -> SnapshotTaken:
        stepper = self._stepper
        started = time.monotonic()
        entries, bulk_bytes = image_entries(stepper.inventory)
        description = encode_description(self._describe(entries, bulk_bytes))
        size = HEADER_BYTES + aligned(bulk_bytes) + len(description)
        slots.files.say = lambda text: stepper.logbook.finding("snapshot", text)
        slot = slots.choose(size, level)
        slot.taken = None
        slot.image.begin()
        slot.writer.write(stepper.inventory, entries)
        size = slot.image.finish(description, bulk_bytes)
        slots.settle(slot)
        blocked_s = time.monotonic() - started
        taken = SnapshotTaken(
            incarnation=stepper.host.incarnation,
            rank=stepper.rank,
            version=stepper.version,
            generation=stepper.host.generation,
            identity=stepper.inventory.identity,
            path=f"/proc/{os.getpid()}/fd/{slot.fd}",
            size_bytes=size,
            bulk_digest=0,  # the agent takes it, off the step
            blocked_s=blocked_s,
            level=level,
            is_suspect=self._is_suspect,
        )
        slots.claim(slot, taken)
        return taken

    def _describe(self, entries: tuple[ImageEntry, ...], bulk_bytes: int) -> ImageDescription:
        stepper = self._stepper
        inventory = stepper.inventory
        assert stepper.boundary_personal is not None
        personal = stepper.own.without_shared(stepper.boundary_personal)
        own = {name for name, _ in personal.smalls}
        shared = SharedLeaves(
            manifest=inventory.manifest(),
            smalls=tuple(
                (name, inventory.small_bytes(name))
                for name in inventory.small_names
                if name not in own
            ),
        )
        return ImageDescription(
            rank=stepper.rank,
            world_size=stepper.world_size,
            version=stepper.version,
            generation=stepper.host.generation,
            identity=inventory.identity,
            run_id=stepper.host.run_id,
            bulk_bytes=bulk_bytes,
            entries=entries,
            personal=encode(personal),
            shared=_encoder.encode(shared),
            loss=(*personal.logged, *self._values),
            is_suspect=self._is_suspect,
        )

    def _failed(self, error: Exception) -> None:
        stepper = self._stepper
        stepper.increments.snapshot_failed()
        stepper.host.tell(
            SnapshotFailed(
                incarnation=stepper.host.incarnation,
                rank=stepper.rank,
                version=stepper.version,
                reason=str(error),
            )
        )
        if type(error) not in self._told:
            self._told.add(type(error))
            text = f"no snapshot at step {stepper.version.step}: {error}"
            stepper.logbook.finding("snapshot", text)

    # ------------------------------------------------------------------ loading

    def load(self, description: ImageDescription, read: ReadEntry, digest: int) -> int:
        """Bulk and shared leaves of an image into the tracked objects; bytes loaded.

        Own leaves are the caller's to put. After an exception the state is undefined.

        Raises:
            StateMismatch: Another structure, or other bytes than were kept.
        """
        inventory = self._stepper.inventory
        if not _is_of(description.identity, inventory.identity):
            raise StateMismatch(
                f"the snapshot of rank {description.rank} is of other objects, shapes or shards: "
                f"identity {description.identity}, here {inventory.identity}"
            )
        shared = decode_shared(description.shared)
        amount = load_entries(inventory, shared.manifest, description.entries, read)
        for name, data in shared.smalls:
            inventory.load_small(name, data)
        found = inventory.bulk_digest()
        if digest and found != digest:
            raise StateMismatch(
                f"loaded state of rank {description.rank} has digest {found:016x}, the snapshot "
                f"of step {description.version.step} has {digest:016x}"
            )
        self.begun_at(description.version.step)
        return amount

    def begun_at(self, step: int) -> None:
        """State of `step` has been loaded: the cadences count from there."""
        self._asked = NONE
        if self._stepper.host.snapshots is not None:
            self._stepper.host.snapshots.begin(step)

    @staticmethod
    def personal_of(description: ImageDescription) -> Personal:
        """Own leaves of an image. Raises RemoteProtocolError."""
        return decode(description.personal)


def _is_of(kept: str, here: str) -> bool:
    """A joiner has not compared its values with anybody's: it takes the longer identity over."""
    return kept == here or (":" not in here and kept.startswith(f"{here}:"))
