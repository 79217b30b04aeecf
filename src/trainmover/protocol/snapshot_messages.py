"""Messages about snapshots, their backups and checkpoints. Bytes of state never travel here.

A worker copies its state into memory shared with its agent (`SnapshotTaken`); the agent keeps it,
sends it to peers' agents and writes durable shards; the controller knows who holds what and
decides for the whole group which version is restored and which checkpoint counts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainmover.protocol.carried import Message, Version

Tier = Literal["disk", "durable"]
"""Where a checkpoint lies: each machine's part on its own disk, or all of it on storage that
every machine reaches."""

# ---------------------------------------------------------------------------------- what they carry


class SnapshotHeld(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's snapshot in one agent's memory."""

    rank: int
    version: Version
    identity: str
    """Of the bulk state; equal on two ranks exactly if they are replicas of each other."""
    kind: Literal["own", "peer"]
    """Taken by a worker of this machine, or received from another machine's agent."""
    size_bytes: int
    bulk_digest: int = 0
    is_suspect: bool = False
    """Taken while the loss was not finite: never chosen while another version is there."""


class BackupPlace(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that is to hold a peer copy."""

    machine: str
    host: str
    port: int


class BackupOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Where the snapshots of one rank go."""

    rank: int
    places: tuple[BackupPlace, ...]


class ShardWritten(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint, durable at its final place."""

    rank: int
    record: str
    """The checkpoint room's record of it, as JSON; opaque to the decider."""


# ---------------------------------------------------------------------------------- worker -> agent


class SnapshotTaken(Message, frozen=True, kw_only=True):
    """This rank's state at `version` is complete in shared memory. The agent opens it at once.

    Said again when the link is up again, for every snapshot the worker still has mapped.
    """

    incarnation: str
    rank: int
    version: Version
    generation: int
    identity: str
    path: str
    """Of the memory file, readable by this user while the worker lives (``/proc/PID/fd/N``)."""
    size_bytes: int
    bulk_digest: int
    blocked_s: float
    """How long the step was blocked for the copy."""
    level: int
    """What the gate asked for: 1 snapshot, 2 snapshot and durable checkpoint, 3 emergency."""
    is_suspect: bool = False


class SnapshotFailed(Message, frozen=True, kw_only=True):
    """No snapshot of `version` could be taken here; training goes on."""

    incarnation: str
    rank: int
    version: Version
    reason: str


class LossAlarm(Message, frozen=True, kw_only=True):
    """The loss that this rank has logged can't be trusted: the last good version is to be kept."""

    incarnation: str
    rank: int
    version: Version
    """Of the state that is suspect."""
    kind: Literal["non_finite", "stuck"]
    text: str


class CadenceChosen(Message, frozen=True, kw_only=True):
    """How often rank 0 asks for snapshots as things stand, and what that costs. For people."""

    incarnation: str
    snapshot_interval_s: float
    """-1: not known yet."""
    checkpoint_interval_s: float
    """-1: not known yet, or none are made."""
    blocked_share: float
    """Of the time, for checkpoints."""
    terabytes_per_hour: float
    age_s: float
    """Oldest that the newest durable state gets; -1: not known yet."""
    reason: str


# ------------------------------------------------------------------------------ agent -> controller


class SnapshotsHeld(Message, frozen=True, kw_only=True):
    """Everything one agent holds; said after each hello and whenever it has changed."""

    machine: str
    incarnation: str
    """Of the agent's process."""
    host: str
    port: int
    """Where other machines' agents and joiners fetch snapshots and send backups."""
    held: tuple[SnapshotHeld, ...]
    level: int = 0
    """Level of the newest own snapshot (see `SnapshotTaken.level`)."""


class ShardsWritten(Message, frozen=True, kw_only=True):
    """This machine's part of checkpoint `version` is durable."""

    machine: str
    number: int
    version: Version
    shards: tuple[ShardWritten, ...]
    seconds: float


class CheckpointFailed(Message, frozen=True, kw_only=True):
    """This machine's part, or the manifest, could not be written; training goes on."""

    machine: str
    number: int
    version: Version
    reason: str


class CheckpointCommitted(Message, frozen=True, kw_only=True):
    """The manifest is durable: the checkpoint counts."""

    machine: str
    number: int
    version: Version
    name: str
    """Of the checkpoint inside the store."""
    tier: Tier = "durable"


# ------------------------------------------------------------------------------ controller -> agent


class PlaceBackups(Message, frozen=True, kw_only=True):
    """Where this machine's ranks keep their peer copies in `generation`; replaces earlier ones."""

    term: int
    generation: int
    orders: tuple[BackupOrder, ...]


class KeepSnapshots(Message, frozen=True, kw_only=True):
    """Snapshots older than `oldest` are needed no more: a newer version is complete everywhere."""

    term: int
    oldest: Version
    void: tuple[Version, ...] = ()
    """Versions to drop by name: of a time line that was rolled back, never to be used again, or
    between one that is being made durable and the newest."""


class WriteCheckpoint(Message, frozen=True, kw_only=True):
    """Write this machine's shards of `version`, or copy them there from this machine's disk."""

    term: int
    number: int
    """Of the checkpoint, counted by the controller; fences older tries."""
    version: Version
    generation: int
    ranks: tuple[int, ...]
    bulk_ranks: tuple[int, ...]
    """Ranks whose bulk is written here; replicas of others write their personal part only."""
    tier: Tier = "durable"
    copied_from: str = ""
    """Name of the checkpoint on this machine's disk whose files are copied; empty: written from
    memory."""


class CommitCheckpoint(Message, frozen=True, kw_only=True):
    """Every shard is where it should be: write the manifest."""

    term: int
    number: int
    version: Version
    generation: int
    world_size: int
    shards: tuple[ShardWritten, ...]
    is_suspect: bool = False
    tier: Tier = "durable"
    """Of `disk`, each machine that has shards writes one."""
    copied_from: str = ""
    """Name of the checkpoint on this machine's disk whose manifest it is; empty: a new one."""
    begun_from: str = ""
    """Run whose checkpoint this job was started from; empty: it began by itself."""
    history: tuple[str, ...] = ()
    """Runs that this one continues, nearest first: their checkpoints count as its own."""


# ----------------------------------------------------------------------------- controller -> worker


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Ask for a snapshot in the next gate, so that all ranks take the same version."""

    term: int
    level: int


class CostsMeasured(Message, frozen=True, kw_only=True):
    """What saves cost and how often this job fails: the cadence of rank 0 goes by it."""

    term: int
    save_s: float
    """From a checkpoint's begin until it was durable; 0: none yet."""
    failures: int
    elapsed_s: float
    """Time in which these failures have happened."""
