"""What the controller knows of kept states: snapshots by agent, time lines left, checkpoints.

Pure data and questions about it. What follows from it is decided in `shelf` (copies), `restoring`
(what a loss is restored from) and `checkpoints` (what is made durable).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from trainmover.protocol.messages import (
    DiskPart,
    PlaceBackups,
    ShardWritten,
    SnapshotHeld,
    Tier,
    Version,
    WriteCheckpoint,
)
from trainmover.topology.keeping import Keeping
from trainmover.units import Instant

START = Version(step=0)
NO_VERSION = Version(step=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """One agent's memory, as it has told."""

    agent: str
    """Incarnation of the agent: another one has nothing of what this one held."""
    host: str
    port: int
    held: tuple[SnapshotHeld, ...] = ()
    level: int = 0
    """Level of the newest own snapshot."""

    def newest_own(self) -> Version | None:
        """Version of the newest snapshot of a worker of that machine."""
        own = [each.version for each in self.held if each.kind == "own"]
        return max(own) if own else None

    def has_left(self, rank: int, version: Version) -> bool:
        """Whether `rank` has taken a later one there and this one is gone: no copy is made of it.

        Others would wait for that copy with their memory full, and take nothing either.
        """
        own = [each.version for each in self.held if each.kind == "own" and each.rank == rank]
        return version not in own and any(later > version for later in own)

    def has(self, rank: int, version: Version) -> bool:
        """Whether that snapshot is there."""
        return any(each.rank == rank and each.version == version for each in self.held)


NO_STORE = Store(agent="", host="", port=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLine:
    """A roll-back or start that left steps behind: generation `number` began at `target`."""

    target: Version
    number: int

    def voids(self, version: Version) -> bool:
        """Whether `version` lies on the time line that was left: it must never be used."""
        return version.step > self.target.step and version.lineage < self.number


@dataclass(frozen=True, kw_only=True, slots=True)
class Durable:
    """A committed checkpoint."""

    name: str
    version: Version
    number: int = 0
    at: Instant | None = None
    """When this controller heard of it; None: before its life."""
    disks: tuple[DiskPart, ...] = ()
    """What of it is taken from machines' own disks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """A checkpoint that a job starts from instead of its own beginning, or goes back to."""

    name: str
    version: Version
    run_id: str = ""
    """Run that made it."""
    history: tuple[str, ...] = ()
    """Runs that the job continues with it, nearest first."""
    disks: tuple[DiskPart, ...] = ()
    """What of it lies on machines' own disks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unchosen:
    """A start that can be chosen only once agents are there to say what machines' disks have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A look into the storage of all and at machines' disks."""

    number: int
    deadline: Instant
    freeze: int = 0
    """Number of the freeze that waits for it; 0: the start does."""
    is_answered: bool = False
    reason: str = ""
    """Why it has found nothing."""
    agents: tuple[tuple[str, str], ...] = ()
    """Machine and agent's incarnation of each disk that could be read when it began."""
    count: int = 1
    """How many there were for that freeze."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """A checkpoint that is being written."""

    number: int
    version: Version
    tries: int
    orders: Mapping[str, WriteCheckpoint]
    """By machine, all of them."""
    queue: tuple[str, ...]
    """Machines whose turn has not come."""
    busy: Mapping[str, Instant] = field(default_factory=dict)
    """Machines that write, and until when they may."""
    shards: Mapping[str, tuple[ShardWritten, ...]] = field(default_factory=dict)
    """By machine that is done."""
    committers: tuple[str, ...] = ()
    """Machines that write a manifest; empty: shards are missing."""
    is_suspect: bool = False
    tier: Tier = "durable"
    names: Mapping[str, str] = field(default_factory=dict)
    """Of the checkpoint, by machine that has written a manifest."""
    is_copy: bool = False
    """Machines' disks are read, not their memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Everything of this kind. Mappings are never changed in place."""

    keeping: Keeping = field(default_factory=Keeping)
    stores: Mapping[str, Store] = field(default_factory=dict)
    """By machine."""
    distrusted: tuple[tuple[str, int, Version], ...] = ()
    """Machine, rank and version of snapshots that could not be loaded: others are used first."""
    unplayable: tuple[tuple[int, Version], ...] = ()
    """Rank and version to which its updates could not be played again: all go back instead."""
    missed: tuple[tuple[int, Version], ...] = ()
    """Rank and version of snapshots that were left out, lately."""
    unlike: tuple[str, ...] = ()
    """Identities of which ranks have held different values: none of them is another's replica."""
    was_complete: bool = False
    """Whether any version has ever been complete: then a beginning from scratch loses too much."""
    is_relearning: bool = False
    """Another life of this controller knew what agents hold; they are about to say it again."""
    time_lines: tuple[TimeLine, ...] = ()
    base: Version = START
    """Where `main` stands when it is entered anew."""
    restore: str = ""
    """Checkpoint that gives it that state; empty: its own beginning."""
    restore_disks: tuple[DiskPart, ...] = ()
    """What of that checkpoint is taken from machines' own disks."""
    disk_checks: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By checkpoint and machine: the agent through which its parts there were compared with their
    checksums; another one may be that of a machine that came back without its disk. Empty: they
    could not be read since."""
    is_start_open: bool = False
    """What the job starts from is not chosen yet: `looking` has it looked for."""
    look: Look | None = None
    """The latest one."""
    oldest: Version = NO_VERSION
    """Older snapshots were said to be needed no more."""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Machines that hold the copies of each machine with ranks."""
    orders: Mapping[str, PlaceBackups] = field(default_factory=dict)
    """By machine, as last sent."""
    ordered_at: Instant | None = None
    is_settled: bool = False
    """Nothing was missing at the last pulse, and nothing has changed since."""
    reasons: tuple[str, ...] = ()
    """Why copies are not where they should be."""
    survival: tuple[float, ...] = ()
    """Chance that copies of all states survive, by machines lost at once (`placing.LOSSES`)."""
    fatal: tuple[str, ...] = ()
    """Fault domains whose loss as a whole they would not survive."""
    wanted_level: int = 0
    """Level of the snapshot that members are asked for; 0: none."""
    wanted_lineage: int = 0
    """The wish is fulfilled by a snapshot of this generation or a later one."""
    wanted_after: Version = NO_VERSION
    """The wish is not fulfilled by snapshots up to this one."""
    wanted_at: Instant | None = None
    due: Version | None = None
    """Newest version whose gate asked for a checkpoint."""
    writing: Writing | None = None
    number: int = 0
    """Highest checkpoint number given out."""
    durable: Durable | None = None
    suspect: Version | None = None
    """Newest one that is durable and marked suspect: it counts for nothing, nor is it due again."""
    given_up: Version | None = None
    """Newest one that could not be made durable in as many tries as there are: the next is due."""
    on_disk: Durable | None = None
    """Newest one of which each machine has its part on its own disk."""
    disk_failure: str = ""
    """Why the newest one is not on machines' disks; empty: it is, or need not be."""
    begun_from: str = ""
    """Run whose checkpoint the job was started from; empty: it began by itself."""
    begun_at: Version = NO_VERSION
    """Version of that checkpoint."""
    history: tuple[str, ...] = ()
    """Runs that this one continues, nearest first."""
    told_costs: tuple[str, float, int] | None = None
    """Who was told last what saves cost, that cost, and the number of failures."""
    told_costs_at: Instant | None = None
    saving: tuple[Version, Instant] | None = None
    """Version that is being made durable, and since when."""
    save_s: float = 0.0
    """How long the latest one took, from its begin until it counted; 0: none in this life."""
    save_bytes: int = 0
    """What snapshots that one was made of."""
    failure: str = ""
    """Why the latest checkpoint that was tried does not exist; empty: it does."""
    failures: int = 0

    @property
    def due_now(self) -> Version | None:
        """The version that is to be made durable, whether it is complete yet or not."""
        is_over = self.due in (self.suspect, self.given_up)
        if self.due is None or is_over or self.is_void(self.due):
            return None
        is_there = self.durable is not None and self.durable.version >= self.due
        return None if is_there else self.due

    def reserved(self, complete: Collection[Version]) -> Version | None:
        """What storage needs of memory: what is being read, or is read as soon as it may begin."""
        if self.writing is None:
            return self.due_now if self.due_now in complete else None
        return None if self.writing.is_copy else self.writing.version  # a copy reads disks

    def is_void(self, version: Version) -> bool:
        """Whether `version` belongs to a time line that was left."""
        return any(line.voids(version) for line in self.time_lines)

    def unlike_now(self) -> tuple[str, ...]:
        """Identities of which ranks pass for replicas of each other and hold other values.

        Experts that every rank builds under one name from one seed begin alike; names, shapes and
        first values can't tell them apart, the first snapshot can.
        """
        found = set(self.unlike)
        digests: dict[tuple[Version, str], int] = {}
        for name in sorted(self.stores):
            for held in self.stores[name].held:
                key = (held.version, held.identity)
                digest = held.bulk_digest
                if digest and digests.setdefault(key, digest) != digest:
                    found.add(held.identity)
        return tuple(sorted(found))
