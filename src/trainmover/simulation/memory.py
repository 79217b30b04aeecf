"""What a simulated agent keeps in memory, and what reaches storage: snapshots, copies, checkpoints.

Plays the snapshot plane of the agent's daemon: slots shared with workers that are written over
while nobody looks, copies that travel between machines and may arrive too late, an agent whose
death takes everything along, storage that now and then fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trainmover import agent
from trainmover.controller.shelf import CHECKPOINT, EMERGENCY
from trainmover.protocol.messages import (
    CommitCheckpoint,
    KeepSnapshots,
    PlaceBackups,
    ShardWritten,
    SnapshotFailed,
    SnapshotHeld,
    SnapshotTaken,
    Version,
    WriteCheckpoint,
)
from trainmover.simulation.numbers import Numbers

if TYPE_CHECKING:
    from trainmover.simulation.machine import Machine
    from trainmover.simulation.process import Process

PORT = 7
SLOTS = 2
FAILURE = "the disk is full"
NEVER = Version(step=-1)


@dataclass
class Slot:
    """Shared memory of one worker: what is in it changes under whoever looks."""

    version: Version | None = None
    numbers: Numbers | None = None
    is_suspect: bool = False
    level: int = 0


@dataclass
class Slots:
    """The slots of one worker, used in turn."""

    rank: int = -1
    identity: str = ""
    slots: list[Slot] = field(default_factory=lambda: [Slot() for _ in range(SLOTS)])

    def take(self, taken: Slot, *, does_wait: bool) -> bool:
        """Into a free slot, else over the oldest; False: that is still needed, and waited for.

        A job's last word takes the newer one's place, as with a real worker.
        """
        free = [index for index, slot in enumerate(self.slots) if slot.version is None]
        if not free and does_wait and taken.level < EMERGENCY:
            return False
        if not free and does_wait:
            free = [max(range(SLOTS), key=lambda index: self.slots[index].version or NEVER)]
        oldest = min(range(SLOTS), key=lambda index: self.slots[index].version or NEVER)
        self.slots[free[0] if free else oldest] = taken
        return True

    def release(self, version: Version) -> None:
        """The agent needs it no more."""
        for index, slot in enumerate(self.slots):
            if slot.version == version:
                self.slots[index] = Slot()


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's state as it is kept somewhere."""

    version: Version
    numbers: Numbers
    identity: str
    is_suspect: bool


@dataclass
class Own:
    """A snapshot of a worker of this machine, while its slot still has it."""

    slots: Slots
    version: Version
    level: int

    def read(self) -> Copy | None:
        """What is there now; None once it was written over."""
        for slot in self.slots.slots:
            if slot.version == self.version and slot.numbers is not None:
                return Copy(self.version, slot.numbers, self.slots.identity, slot.is_suspect)
        return None


class Memory:
    """The snapshot plane of one agent process."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.world = machine.world
        self.life = machine.life
        self.own: dict[tuple[int, Version], Own] = {}
        self.peers: dict[tuple[int, Version], Copy] = {}
        self.order: PlaceBackups | None = None
        self.sent: set[tuple[int, Version, str]] = set()

    def is_alive(self) -> bool:
        """Whether the agent process that this memory belongs to lives."""
        return self.machine.is_agent_alive and self.machine.life == self.life

    # ------------------------------------------------------------------ what is here

    def read(self, rank: int, version: Version) -> Copy | None:
        """One rank's state, if it is here whole."""
        own = self.own.get((rank, version))
        found = own.read() if own is not None else None
        return found if found is not None else self.peers.get((rank, version))

    def tell(self) -> None:
        """Everything that is held, to the decider."""
        gone = [key for key, own in self.own.items() if own.read() is None]
        for key in gone:
            del self.own[key]
        held = []
        for key in sorted({*self.own, *self.peers}):
            copy = self.read(*key)
            if copy is None:
                continue
            one = SnapshotHeld(
                rank=key[0],
                version=copy.version,
                identity=copy.identity,
                kind="own" if key in self.own else "peer",
                size_bytes=8,
                is_suspect=copy.is_suspect,
            )
            held.append(one)
        newest = max((version for _, version in self.own), default=None)
        levels = [own.level for own in self.own.values() if own.version == newest]
        event = agent.SnapshotsChanged(
            host=self.machine.name, port=PORT, held=tuple(held), level=max(levels, default=0)
        )
        self.machine.feed(event)
        self.world.check_memory(self)

    # ------------------------------------------------------------------ commands

    def open(self, taken: SnapshotTaken) -> None:
        """A worker of this machine has filled a slot."""
        process = self.world.processes.get(taken.incarnation)
        if process is None:
            return
        key = (taken.rank, taken.version)
        self.own[key] = Own(process.slots, taken.version, taken.level)
        self.tell()
        self._ship(*key)

    def place(self, order: PlaceBackups) -> None:
        """Copies go elsewhere from now on; whatever is missing there is sent again."""
        self.order = order
        self.sent = {key for key in self.sent if self._arrived(*key)}
        for rank, version in sorted(self.own):
            self._ship(rank, version)

    def _arrived(self, rank: int, version: Version, name: str) -> bool:
        there = self.world.machines[name].memory
        return there is not None and (rank, version) in there.peers

    def _ship(self, rank: int, version: Version) -> None:
        for order in self.order.orders if self.order is not None else ():
            if order.rank != rank:
                continue
            for place in order.places:
                key = (rank, version, place.machine)
                if key not in self.sent:
                    self.sent.add(key)
                    delay = self.world.delay_ns(self.world.scenario.move_s)
                    self.world.schedule.at(
                        self.world.schedule.now + delay, partial(self._deliver, key)
                    )

    def _deliver(self, key: tuple[int, Version, str]) -> None:
        rank, version, name = key
        there = self.world.machines[name].memory
        copy = self.read(rank, version)
        is_there = there is not None and there.is_alive()
        if not self.is_alive() or not is_there or copy is None:
            self.sent.discard(key)
            return
        if self.world.is_cut(self.machine.name, name):
            self.sent.discard(key)
            return
        assert there is not None
        there.peers[rank, version] = copy
        there.tell()

    def drop(self, keep: KeepSnapshots) -> None:
        """Free what is needed no more."""
        for key in sorted({*self.own, *self.peers}):
            if key[1] < keep.oldest or key[1] in keep.void:
                own = self.own.pop(key, None)
                self.peers.pop(key, None)
                if own is not None:
                    own.slots.release(key[1])
        self.tell()

    # ------------------------------------------------------------------ storage

    def write(self, order: WriteCheckpoint) -> None:
        """This machine's shards, some time later; or not."""
        there = self.machine.disk.get(order.copied_from, {})
        found = {
            rank: there.get(rank) if order.copied_from else self.read(rank, order.version)
            for rank in order.ranks
        }
        self._later(partial(self._written, order, found))

    def _later(self, action: partial[None]) -> None:
        delay = self.world.delay_ns(self.world.scenario.move_s)
        self.world.schedule.at(self.world.schedule.now + delay, action)

    def _written(self, order: WriteCheckpoint, found: dict[int, Copy | None]) -> None:
        if not self.is_alive():
            return
        missing = [rank for rank, copy in found.items() if copy is None]
        if missing or self._does_fail(order):
            reason = f"no snapshot of ranks {missing}" if missing else FAILURE
            self._fail(order, reason)
            return
        for rank, copy in found.items():
            assert copy is not None
            shards = self.machine.staged if order.tier == "disk" else self.world.shards
            shards[order.number, rank] = copy
        told = tuple(ShardWritten(rank=rank, record="{}") for rank in order.ranks)
        event = agent.ShardsDone(
            number=order.number, version=order.version, shards=told, seconds=0.1
        )
        self.machine.feed(event)

    def commit(self, order: CommitCheckpoint) -> None:
        """The manifest, some time later; or not."""
        self._later(partial(self._committed, order))

    def _committed(self, order: CommitCheckpoint) -> None:
        if not self.is_alive():
            return
        if self._does_fail(order):
            self._fail(order, FAILURE)
            return
        name = f"step-{order.version.step}-{order.number}"
        if order.tier == "disk":
            self._commit_on_disk(order, name)
            return
        ranks = sorted(shard.rank for shard in order.shards)
        if ranks != list(range(order.world_size)):
            self.world.fail("CK-1", f"checkpoint {order.number} is committed with ranks {ranks}")
            return
        copies = {rank: self.world.shards[order.number, rank] for rank in ranks}
        if {copy.version for copy in copies.values()} != {order.version}:
            self.world.fail("CK-1", f"checkpoint {order.number} mixes versions")
        self.world.durable[name] = copies
        self.machine.feed(agent.ManifestDone(number=order.number, version=order.version, name=name))

    def _commit_on_disk(self, order: CommitCheckpoint, name: str) -> None:
        """This machine's part only."""
        staged = self.machine.staged
        mine = [shard.rank for shard in order.shards if (order.number, shard.rank) in staged]
        if not mine:
            self._fail(order, "the shards are not there")  # another disk than they were written to
            return
        self.machine.disk[name] = {rank: staged[order.number, rank] for rank in mine}
        done = agent.ManifestDone(
            number=order.number, version=order.version, name=name, tier="disk"
        )
        self.machine.feed(done)

    def _does_fail(self, order: WriteCheckpoint | CommitCheckpoint) -> bool:
        scenario = self.world.scenario
        is_there = scenario.has_storage or order.tier == "disk"
        return not is_there or self.world.random.random() < scenario.storage_fails

    def _fail(self, order: WriteCheckpoint | CommitCheckpoint, reason: str) -> None:
        event = agent.CheckpointWriteFailed(
            number=order.number, version=order.version, reason=reason
        )
        self.machine.feed(event)


def take(process: Process, version: Version, level: int, *, is_suspect: bool) -> None:
    """A snapshot at a boundary: into the next slot, then said to the agent."""
    process.slots.rank = process.life.rank
    process.slots.identity = process.identity()
    slot = Slot(version, process.numbers, is_suspect, level)
    if not process.slots.take(slot, does_wait=process.world.scenario.slots_wait):
        failed = SnapshotFailed(
            incarnation=process.name, rank=process.life.rank, version=version, reason="no free slot"
        )
        process.host.from_worker(process, failed)
        return
    process.host.from_worker(process, _taken(process, version, level, is_suspect=is_suspect))


def take_last(process: Process, version: Version) -> None:
    """Behind the loop: what the job ends with is to be in a checkpoint."""
    taken = any(
        slot.version == version and slot.level >= CHECKPOINT for slot in process.slots.slots
    )
    if process.world.scenario.keeps_checkpoints and version.step > 0 and not taken:
        take(process, version, EMERGENCY, is_suspect=False)


def _taken(process: Process, version: Version, level: int, *, is_suspect: bool) -> SnapshotTaken:
    return SnapshotTaken(
        incarnation=process.name,
        rank=process.slots.rank,
        version=version,
        generation=process.generation,
        identity=process.slots.identity,
        path=f"/proc/{process.pid}/fd/9",
        size_bytes=8,
        bulk_digest=0,
        blocked_s=0.0,
        level=level,
        is_suspect=is_suspect,
    )


def say_again(process: Process) -> None:
    """The agent is a new one: it has to open what is still mapped."""
    for slot in process.slots.slots:
        if slot.version is not None:
            body = _taken(process, slot.version, slot.level, is_suspect=slot.is_suspect)
            process.host.from_worker(process, body)
