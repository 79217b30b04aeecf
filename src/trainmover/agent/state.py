"""What the agent knows: events, commands, its workers, and one class per phase. Pure data.

Phases: Registering -> Serving -> (Leaving) -> Ending -> Ended. Losing the link changes no phase:
workers run on, and `AgentHello` is said again on the next link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from trainmover.agent.config import Config
from trainmover.protocol.messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    Facts,
    FromAgentMessage,
    FromWorkerBody,
    JobSpec,
    KeepSnapshots,
    PlaceBackups,
    ShardsWritten,
    ShardWritten,
    SnapshotHeld,
    SnapshotsHeld,
    SnapshotTaken,
    StandbyFailed,
    StandbyReady,
    Tier,
    ToAgentMessage,
    ToWorkerBody,
    Version,
    WorkerExited,
    WorkerLaunch,
    WorkerLaunchFailed,
    WorkerStatus,
    WorkerUp,
    WriteCheckpoint,
)
from trainmover.units import Instant

NO_FACTS = Facts()

# --------------------------------------------------------------------------- events and commands


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of what happens to the agent."""


class FromController(AgentEvent, frozen=True, kw_only=True):
    """A message of the controller."""

    body: ToAgentMessage


class LinkUp(AgentEvent, frozen=True, kw_only=True):
    """The link to the controller is up: say hello."""


class LinkDown(AgentEvent, frozen=True, kw_only=True):
    """The link to the controller is gone."""


class WorkerLinked(AgentEvent, frozen=True, kw_only=True):
    """A worker has connected; a worker unknown so far outlived the agent before us."""

    incarnation: str
    local_rank: int = -1
    pid: int = 0


class WorkerUnlinked(AgentEvent, frozen=True, kw_only=True):
    """A worker's connection is gone; its process may live."""

    incarnation: str


class FromWorkerLink(AgentEvent, frozen=True, kw_only=True):
    """A worker's message."""

    incarnation: str
    body: FromWorkerBody


class ProcessStarted(AgentEvent, frozen=True, kw_only=True):
    """A launched worker's process exists."""

    incarnation: str
    pid: int


class ProcessExited(AgentEvent, frozen=True, kw_only=True):
    """A worker's process has ended and is reaped; children of it may live."""

    incarnation: str
    exit_code: int | None = None
    signal: int | None = None
    log_tail: str = ""


class LaunchFailed(AgentEvent, frozen=True, kw_only=True):
    """A worker's process could not be started."""

    incarnation: str
    reason: str


class Pulse(AgentEvent, frozen=True, kw_only=True):
    """What a probe has just read of the workers' progress pages and process states."""

    workers: tuple[WorkerStatus, ...]


class SnapshotsChanged(AgentEvent, frozen=True, kw_only=True):
    """What this machine's memory holds now, and where others reach it; complete, never a change."""

    host: str
    port: int
    held: tuple[SnapshotHeld, ...]
    level: int = 0
    """Level of the newest own snapshot (see `SnapshotTaken.level`)."""


class ShardsDone(AgentEvent, frozen=True, kw_only=True):
    """`WriteShards` has been carried out: this machine's shards are durable."""

    number: int
    version: Version
    shards: tuple[ShardWritten, ...]
    seconds: float


class ManifestDone(AgentEvent, frozen=True, kw_only=True):
    """`WriteManifest` has been carried out: the checkpoint counts on that tier."""

    number: int
    version: Version
    name: str
    tier: Tier = "durable"


class CheckpointWriteFailed(AgentEvent, frozen=True, kw_only=True):
    """`WriteShards` or `WriteManifest` could not be carried out."""

    number: int
    version: Version
    reason: str


class StopAsked(AgentEvent, frozen=True, kw_only=True):
    """Somebody asks this machine to leave the job (SIGTERM, preemption notice)."""

    reason: str
    grace_s: float = 0.0
    """Seconds until the machine is taken away; 0: nobody has said."""
    is_notice: bool = False
    """Said by a scheduler, which repeats itself: the second time changes nothing."""


class Tick(AgentEvent, frozen=True, kw_only=True):
    """Time has passed."""


Event = (
    FromController
    | LinkUp
    | LinkDown
    | WorkerLinked
    | WorkerUnlinked
    | FromWorkerLink
    | ProcessStarted
    | ProcessExited
    | LaunchFailed
    | Pulse
    | SnapshotsChanged
    | ShardsDone
    | ManifestDone
    | CheckpointWriteFailed
    | StopAsked
    | Tick
)


class AgentCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of commands; carried out in order."""


class Launch(AgentCommand, frozen=True, kw_only=True):
    """Start a worker: answered by `ProcessStarted` or `LaunchFailed`."""

    launch: WorkerLaunch
    spec: JobSpec


class Kill(AgentCommand, frozen=True, kw_only=True):
    """SIGKILL the worker's whole process group; of an ended worker too: its children may live."""

    incarnation: str


class ToController(AgentCommand, frozen=True, kw_only=True):
    """Send on the link; only given while it is up."""

    body: FromAgentMessage


class ToWorkerLink(AgentCommand, frozen=True, kw_only=True):
    """Hand a message to a worker; dropped where it has no connection, since it is sent again."""

    incarnation: str
    body: ToWorkerBody


class OpenSnapshot(AgentCommand, frozen=True, kw_only=True):
    """Open and map a worker's snapshot at once; `SnapshotsChanged` follows once it is held."""

    incarnation: str
    taken: SnapshotTaken


class ShipBackups(AgentCommand, frozen=True, kw_only=True):
    """From now on send each own snapshot, the newest one too, to these places."""

    order: PlaceBackups


class DropSnapshots(AgentCommand, frozen=True, kw_only=True):
    """Free what `keep` says is needed no more, own and peers'; `SnapshotsChanged` follows."""

    keep: KeepSnapshots


class WriteShards(AgentCommand, frozen=True, kw_only=True):
    """Make this machine's part durable: answered by `ShardsDone` or `CheckpointWriteFailed`."""

    order: WriteCheckpoint


class WriteManifest(AgentCommand, frozen=True, kw_only=True):
    """Make the checkpoint count: answered by `ManifestDone` or `CheckpointWriteFailed`."""

    order: CommitCheckpoint


class Exit(AgentCommand, frozen=True, kw_only=True):
    """The last command: end the agent's process (and its nursery) with `code`."""

    code: int
    reason: str


Command = (
    Launch
    | Kill
    | ToController
    | ToWorkerLink
    | OpenSnapshot
    | ShipBackups
    | DropSnapshots
    | WriteShards
    | WriteManifest
    | Exit
)

# --------------------------------------------------------------------------- workers and phases


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process life of a worker on this machine."""

    incarnation: str
    local_rank: int
    pid: int = 0
    """0: launched, existence not confirmed."""
    status: WorkerStatus | None = None
    up: WorkerUp | None = None
    """Kept to introduce the worker to a restarted controller."""
    readiness: StandbyReady | StandbyFailed | None = None
    killed_at: Instant | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shelf:
    """What this machine keeps of states, and its part in the checkpoint under way."""

    held: SnapshotsHeld | None = None
    """As last told; None: the snapshot plane has not said where it listens."""
    repeats_left: int = 0
    """Heartbeats that repeat `held`: nobody answers it."""
    backups: PlaceBackups | None = None
    number: int = 0
    """Highest checkpoint number heard of; orders of lower ones are void."""
    writing: Literal["", "shards", "manifest"] = ""
    """What of `number` is being written."""
    shards: ShardsWritten | None = None
    """Of `number`, once durable."""
    manifest: CheckpointCommitted | None = None
    failure: CheckpointFailed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Registering:
    """Not welcomed yet in this life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Welcomed: launches, hands messages on."""

    spec: JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaving:
    """Asked to stop; the controller moves our ranks elsewhere."""

    spec: JobSpec
    reason: str
    deadline: Instant
    is_hurried: bool = False
    """The deadline is that of a machine that is taken away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Workers may end by themselves until the deadline, then they are killed."""

    code: int
    reason: str
    deadline: Instant
    is_killing: bool = False
    """The first deadline has passed; at the next the agent ends whatever is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """`Exit` has been given."""

    code: int


Phase = Registering | Serving | Leaving | Ending | Ended


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything the agent knows. Mappings are never changed in place."""

    config: Config
    machine: str
    incarnation: str
    phase: Phase
    facts: Facts = NO_FACTS
    labels: tuple[tuple[str, str], ...] = ()
    term: int = 0
    """Highest term heard of; lower ones are not obeyed."""
    is_linked: bool = False
    is_welcomed: bool = False
    """Whether this link's hello has been answered."""
    unlinked_since: Instant
    workers: Mapping[str, Worker] = field(default_factory=dict)
    ended: tuple[WorkerExited | WorkerLaunchFailed, ...] = ()
    """Ends that were reported, newest last: a late launch order starts none of them again."""
    outbox: tuple[FromAgentMessage, ...] = ()
    """What must not get lost while the controller is away."""
    recent: tuple[FromAgentMessage, ...] = ()
    """Said once, lately: repeated after each registration, known ones are dropped there."""
    shelf: Shelf = Shelf()
    heartbeat_at: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """Result of one move of the decider."""

    state: State
    commands: tuple[Command, ...]
    reason: str
