"""Messages about snapshots, their backups and checkpoints. Bytes of state never travel here.

A worker copies its state into memory shared with its agent (`SnapshotTaken`); the agent keeps it,
sends it to peers' agents and writes durable shards; the controller knows who holds what and
decides for the whole group which version is restored and which checkpoint counts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainmover.protocol.carried import Message, Version

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
    """Write this machine's shards of `version` to the checkpoint store."""

    term: int
    number: int
    """Of the checkpoint, counted by the controller; fences older tries."""
    version: Version
    generation: int
    ranks: tuple[int, ...]
    bulk_ranks: tuple[int, ...]
    """Ranks whose bulk is written here; replicas of others write their personal part only."""


class CommitCheckpoint(Message, frozen=True, kw_only=True):
    """Every shard is durable: write the manifest."""

    term: int
    number: int
    version: Version
    generation: int
    world_size: int
    shards: tuple[ShardWritten, ...]
    is_suspect: bool = False


# ----------------------------------------------------------------------------- controller -> worker


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Ask for a snapshot in the next gate, so that all ranks take the same version."""

    term: int
    level: int
