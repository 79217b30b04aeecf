"""Messages between agent and controller, and between operator and controller."""

from __future__ import annotations

from typing import Literal

from trainmover.protocol.carried import (
    Facts,
    JobSpec,
    Message,
    WorkerLaunch,
    WorkerStatus,
)
from trainmover.protocol.snapshot_messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    KeepSnapshots,
    PlaceBackups,
    ShardsWritten,
    SnapshotsHeld,
    WriteCheckpoint,
)
from trainmover.protocol.worker_messages import FromWorkerBody, ToWorkerBody

# --------------------------------------------------------------------------- agent <-> controller


class AgentHello(Message, frozen=True, kw_only=True):
    """First message of an agent on a link, and again after each reconnection."""

    machine: str
    incarnation: str
    """Of the agent's process."""
    term_seen: int = 0
    facts: Facts = Facts()
    labels: tuple[tuple[str, str], ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    """Workers alive here, adopted ones included."""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Every `agent.heartbeat_interval_s`."""

    machine: str
    incarnation: str
    workers: tuple[WorkerStatus, ...] = ()


class WorkerStarted(Message, frozen=True, kw_only=True):
    """The process exists."""

    machine: str
    incarnation: str
    local_rank: int
    pid: int


class WorkerLaunchFailed(Message, frozen=True, kw_only=True):
    """The process could not be started."""

    machine: str
    incarnation: str
    reason: str


class WorkerExited(Message, frozen=True, kw_only=True):
    """The process has ended and is reaped; its whole process group is dead."""

    machine: str
    incarnation: str
    exit_code: int | None
    signal: int | None
    log_tail: str = ""


class FromWorker(Message, frozen=True, kw_only=True):
    """A worker's message, unchanged."""

    machine: str
    incarnation: str
    body: FromWorkerBody


class AgentLeaving(Message, frozen=True, kw_only=True):
    """The agent was asked to stop: move its ranks elsewhere; it waits for the leave to finish."""

    machine: str
    reason: str
    grace_s: float = 0.0
    """Seconds until the machine is taken away; 0: nobody has said."""


class Welcome(Message, frozen=True, kw_only=True):
    """Registration accepted."""

    term: int
    spec: JobSpec


class Refused(Message, frozen=True, kw_only=True):
    """Registration refused; the agent exits with `code`."""

    term: int
    reason: str
    code: int


class LaunchWorkers(Message, frozen=True, kw_only=True):
    """Start these, unless they run already."""

    term: int
    launches: tuple[WorkerLaunch, ...]


class KillWorker(Message, frozen=True, kw_only=True):
    """SIGKILL the worker's process group and reap it; answer: `WorkerExited`."""

    term: int
    incarnation: str
    reason: str


class ToWorker(Message, frozen=True, kw_only=True):
    """For one worker of this machine."""

    term: int
    incarnation: str
    body: ToWorkerBody


class StopAgent(Message, frozen=True, kw_only=True):
    """The job is over: end all workers (gracefully for `grace_s`), exit with `code`."""

    term: int
    code: int
    reason: str
    grace_s: float = 5.0


FromAgentMessage = (
    AgentHello
    | Heartbeat
    | WorkerStarted
    | WorkerLaunchFailed
    | WorkerExited
    | FromWorker
    | AgentLeaving
    | SnapshotsHeld
    | ShardsWritten
    | CheckpointFailed
    | CheckpointCommitted
)
ToAgentMessage = (
    Welcome
    | Refused
    | LaunchWorkers
    | KillWorker
    | ToWorker
    | StopAgent
    | PlaceBackups
    | KeepSnapshots
    | WriteCheckpoint
    | CommitCheckpoint
)


# -------------------------------------------------------------------------- operator <-> controller


class SwitchoverRequest(Message, frozen=True, kw_only=True):
    """Move these machines' ranks to standbys."""

    request: str
    machines: tuple[str, ...]
    to: tuple[str, ...] = ()
    """Standbys in the same order; empty: the controller chooses."""


class StopRequest(Message, frozen=True, kw_only=True):
    """Stop the job: at the next boundary, or now."""

    request: str
    mode: Literal["boundary", "now"]
    grace_s: float = 0.0
    """Seconds until everything is killed from outside; 0: there is time. What can't be saved in it
    is left out."""


class PreemptionNotice(Message, frozen=True, kw_only=True):
    """These machines are about to be taken away: save what they hold, move what can be moved."""

    request: str
    machines: tuple[str, ...]
    grace_s: float = 0.0
    """Seconds until then; 0: nobody has said."""


class SaveRequest(Message, frozen=True, kw_only=True):
    """A checkpoint of the next step boundary, please; training goes on."""

    request: str


class OperatorReply(Message, frozen=True, kw_only=True):
    """Answer to one request; a switchover answers when accepted and again when it has ended."""

    request: str
    is_accepted: bool
    is_final: bool
    text: str
    number: int = 0


FromOperatorMessage = SwitchoverRequest | StopRequest | PreemptionNotice | SaveRequest
