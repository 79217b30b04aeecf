"""What the controller knows of kept states: snapshots by agent, time lines left, checkpoints.

Pure data and questions about it. What follows from it is decided in `shelf` (copies), `restoring`
(what a loss is restored from) and `checkpoints` (what is made durable).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainmover.protocol.messages import (
    PlaceBackups,
    ShardWritten,
    SnapshotHeld,
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

    def has(self, rank: int, version: Version) -> bool:
        """Whether that snapshot is there."""
        return any(each.rank == rank and each.version == version for each in self.held)


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
    committer: str = ""
    """Machine that writes the manifest; empty: shards are missing."""
    is_suspect: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Everything of this kind. Mappings are never changed in place."""

    keeping: Keeping = field(default_factory=Keeping)
    stores: Mapping[str, Store] = field(default_factory=dict)
    """By machine."""
    distrusted: tuple[tuple[str, int, Version], ...] = ()
    """Machine, rank and version of snapshots that could not be loaded: others are used first."""
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
    wanted_level: int = 0
    """Level of the snapshot that members are asked for; 0: none."""
    wanted_lineage: int = 0
    """The wish is fulfilled by a snapshot of this generation or a later one."""
    wanted_at: Instant | None = None
    due: Version | None = None
    """Newest version whose gate asked for a checkpoint."""
    writing: Writing | None = None
    number: int = 0
    """Highest checkpoint number given out."""
    durable: Durable | None = None
    failure: str = ""
    """Why the latest checkpoint that was tried does not exist; empty: it does."""
    failures: int = 0

    def is_void(self, version: Version) -> bool:
        """Whether `version` belongs to a time line that was left."""
        return any(line.voids(version) for line in self.time_lines)
