"""Every message that crosses a process boundary, and what they carry.

Frozen, keyword-only, tagged structs of ids, ints, strings and tuples; the class name is the wire
tag. Tensors never travel here; a message names a rank, a generation or a version. One process's
command is the next one's event: an agent hands `FromWorker.body` on unchanged, and a worker
receives `ToWorker.body` unchanged.

All messages are idempotent and may be sent twice; each awaited answer is re-requested until it
comes or its deadline passes. `term` numbers a controller's life; workers and agents obey only
the highest term they have seen.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainmover.topology import Member, Membership


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Root of all messages; the class name is the tag on the wire."""


# --------------------------------------------------------------------------- what they carry


class Version(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """State of a rank entering step `step`; lineage: generation in which gate step-1 passed."""

    step: int
    lineage: int = 0


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that failed, as one end saw it."""

    peer: str
    """Incarnation at the other end."""
    reason: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a joiner gets the state of its rank."""

    rank: int
    bulk_from: str
    """Incarnation of the leaver or of a live replica."""
    own_from: str
    """Incarnation that holds the rank's own personal state: the leaver or a backup."""
    shared_from: str
    """Incarnation of any stayer (or the leaver) at the target version."""
    kind: Literal["leaver", "replica"]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A switchover from `base_generation` to generation `number`; never changes once journaled."""

    number: int
    kind: Literal["form", "planned", "unplanned"]
    base_generation: int
    target: Version
    membership: Membership
    """Its generation equals `number`."""
    leavers: tuple[str, ...] = ()
    leaver_members: tuple[Member, ...] = ()
    """Planned leavers with their old ranks and addresses: joiners fetch state from them."""
    joiners: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    """One per joiner; empty when `is_fresh_start`."""
    result: tuple[int, ...] = ()
    """Merged gate flags of step target-1, for ranks that are held at that gate."""
    attempts: int = 0
    """Most attempts of a step any stayer has started so far; ranks with fewer run out the
    difference while DDP's buckets are not settled yet (facts: DDP rebuilds them once)."""
    is_fresh_start: bool = False
    """Nobody has state worth keeping: every member enters `main` anew (formation, or a loss
    while `main` was still building)."""
    reason: str = ""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Personal state of `owner_rank` held by the reporting worker."""

    owner_rank: int
    version: Version
    is_final: bool
    """False where the owner changes own leaves after its gate and only the gate copy is held."""


class ChannelCount(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut-over did to one worker's channels."""

    inherited: int = 0
    opened: int = 0
    closed: int = 0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A named instant on the sender's own monotonic clock."""

    name: str
    at_ns: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all machines for the numbers to be equal, and what should be."""

    must_equal: tuple[tuple[str, str], ...] = ()
    should_equal: tuple[tuple[str, str], ...] = ()


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to launch workers."""

    job: str
    run_id: str
    script: str
    arguments: tuple[str, ...] = ()
    world_size: int
    workers_per_machine: int
    environment: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    """Flattened configuration (``worker.gate_timeout_s`` -> ``5.0``) for agents and workers."""
    working_directory: str = ""
    log_directory: str = ""


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to start."""

    incarnation: str
    local_rank: int
    machine: str


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its agent sees it; sent with each heartbeat and on (re-)registration."""

    incarnation: str
    local_rank: int
    pid: int
    generation: int = 0
    step: int = -1
    gate: int = -1
    """Last gate passed: proof of life."""
    phase: str = ""
    process_state: str = ""
    """One letter of the operating system: R, S, D, T (stopped), Z."""
    last_collective: str = ""


# --------------------------------------------------------------------------- worker -> controller


class WorkerUp(Message, frozen=True, kw_only=True):
    """Process runs, its channels listen; `main` not entered."""

    incarnation: str
    host: str
    port: int
    pid: int
    facts: Facts = Facts()


class Tracked(Message, frozen=True, kw_only=True):
    """This rank has reached its first boundary and knows its inventory."""

    incarnation: str
    rank: int
    identity: str
    names_digest: int


class StandbyReady(Message, frozen=True, kw_only=True):
    """A standby has built `main` and is parked at a boundary."""

    incarnation: str
    as_rank: int
    identity: str
    attempts: int
    sequence_digest: str
    """Digest of the settled collective sequence of one step."""
    can_adopt_in_place: bool
    reason: str = ""
    """Why `main` must be entered again for another rank: file:line of the read of the rank."""
    seconds: float = 0.0


class StandbyFailed(Message, frozen=True, kw_only=True):
    """A standby could not build `main`; it is not counted as a standby."""

    incarnation: str
    reason: str


class Broken(Message, frozen=True, kw_only=True):
    """Channels of `generation` failed, or a gate waited too long."""

    incarnation: str
    generation: int
    step: int
    edges: tuple[Edge, ...]
    detected_at_ns: int = 0


class Report(Message, frozen=True, kw_only=True):
    """Answer to `Freeze(number)`: nothing after it changes what it says, except the plan."""

    incarnation: str
    number: int
    generation: int
    rank: int
    """-1: has no rank (standby)."""
    prepared_number: int = 0
    """Number of a plan this worker is PREPARED for and has not seen committed; 0 none."""
    applied: Version = Version(step=0)
    has_entered: bool = False
    """Whether it has contributed to the gate of step `applied.step`."""
    last_result: tuple[int, ...] = ()
    """Merged flags of the gate of step applied.step - 1, if passed in this process."""
    broken_state: str = ""
    """Names what a collective after the gate may have spoilt; empty: state is clean."""
    is_building: bool = False
    """`main` has not reached its first boundary."""
    identity: str = ""
    attempts: int = 0
    sequence_digest: str = ""
    personal: tuple[Held, ...] = ()
    edges: tuple[Edge, ...] = ()


class AtBoundary(Message, frozen=True, kw_only=True):
    """Stopped at the boundary that a flagged gate named."""

    incarnation: str
    number: int
    version: Version


class PhaseOneReady(Message, frozen=True, kw_only=True):
    """Channels the plan adds are open on this worker; a joiner has built `main` as its rank."""

    incarnation: str
    number: int


class PhaseOneFailed(Message, frozen=True, kw_only=True):
    """A channel or the joiner's `main` could not be prepared."""

    incarnation: str
    number: int
    edge: Edge


class Done(Message, frozen=True, kw_only=True):
    """PREPARED: channels swapped, state complete and verified at exactly `version`."""

    incarnation: str
    number: int
    version: Version
    identity: str = ""
    bulk_digest: int = 0
    shared_digest: int = 0
    channels: ChannelCount = ChannelCount()
    bytes_received: int = 0
    adopted: Literal["", "in_place", "reentered", "as_built"] = ""
    marks: tuple[Mark, ...] = ()


class Lost(Message, frozen=True, kw_only=True):
    """While preparing generation `number`, a channel that only it uses broke."""

    incarnation: str
    number: int
    edge: Edge


class CommitAcknowledged(Message, frozen=True, kw_only=True):
    """Runs in generation `number`."""

    incarnation: str
    number: int


class FirstGate(Message, frozen=True, kw_only=True):
    """The first gate of `generation` passed here."""

    incarnation: str
    generation: int
    step: int
    marks: tuple[Mark, ...] = ()


class FinishPassed(Message, frozen=True, kw_only=True):
    """The finish gate passed: every rank has done all steps."""

    incarnation: str
    generation: int
    step: int
    is_stopped: bool = False
    """The gate carried a stop request instead of the end of the loop."""


class ScriptFailed(Message, frozen=True, kw_only=True):
    """The user's code raised."""

    incarnation: str
    rank: int
    step: int
    text: str
    """Traceback."""
    error: str
    """Exception type and message, one line."""
    was_running_out: bool
    is_machine_caused: bool
    """By the table in worker/blame.py: accelerator error, EIO/ENOSPC, loader worker killed..."""


class StepLogged(Message, frozen=True, kw_only=True):
    """What `step.log` recorded for a committed step, once, by the primary. Not for the decider."""

    incarnation: str
    step: int
    lineage: int
    values: tuple[tuple[str, str], ...]
    """Name and value; floats as float.hex() of the value."""


class Finding(Message, frozen=True, kw_only=True):
    """Something the user should know, with file and line. Not for the decider."""

    incarnation: str
    rank: int
    kind: str
    text: str


class LinkLost(Message, frozen=True, kw_only=True):
    """The worker gives up: no controller for too long, or its own protocol error."""

    incarnation: str
    reason: str
    code: int


FromWorkerBody = (
    WorkerUp
    | Tracked
    | StandbyReady
    | StandbyFailed
    | Broken
    | Report
    | AtBoundary
    | PhaseOneReady
    | PhaseOneFailed
    | Done
    | Lost
    | CommitAcknowledged
    | FirstGate
    | FinishPassed
    | ScriptFailed
    | StepLogged
    | Finding
    | LinkLost
)

# --------------------------------------------------------------------------- controller -> worker


class BecomeStandby(Message, frozen=True, kw_only=True):
    """Build `main` as `as_rank` in loop-back and park at a boundary."""

    term: int
    as_rank: int
    world_size: int


class Prepare(Message, frozen=True, kw_only=True):
    """Phase one of a planned switchover; training goes on."""

    term: int
    plan: Plan


class RaiseFlag(Message, frozen=True, kw_only=True):
    """All phase-one work is done: carry `number` in the next gate."""

    term: int
    number: int


class Freeze(Message, frozen=True, kw_only=True):
    """Pass no gate of a generation below `number` any more, and report."""

    term: int
    number: int


class PlanIssued(Message, frozen=True, kw_only=True):
    """Carry out `plan` (journaled)."""

    term: int
    plan: Plan


class Commit(Message, frozen=True, kw_only=True):
    """Generation `number` is the job's (journaled)."""

    term: int
    number: int


class Abort(Message, frozen=True, kw_only=True):
    """Generation `number` will never be (journaled)."""

    term: int
    number: int
    reason: str = ""


class Release(Message, frozen=True, kw_only=True):
    """The leaver's state is needed no more: leave."""

    term: int
    number: int


class Fence(Message, frozen=True, kw_only=True):
    """Not a member any more: touch nothing, end."""

    term: int
    generation: int
    reason: str


class Complete(Message, frozen=True, kw_only=True):
    """Every rank has finished (journaled): `main` may return, the process may end."""

    term: int


class StopAtBoundary(Message, frozen=True, kw_only=True):
    """Carry a stop request in the next gate."""

    term: int


class StopNow(Message, frozen=True, kw_only=True):
    """End at once with `code`."""

    term: int
    code: int
    reason: str


ToWorkerBody = (
    BecomeStandby
    | Prepare
    | RaiseFlag
    | Freeze
    | PlanIssued
    | Commit
    | Abort
    | Release
    | Fence
    | Complete
    | StopAtBoundary
    | StopNow
)

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
)
ToAgentMessage = Welcome | Refused | LaunchWorkers | KillWorker | ToWorker | StopAgent

# --------------------------------------------------------------------------- operator <-> controller


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


class OperatorReply(Message, frozen=True, kw_only=True):
    """Answer to one request; a switchover answers when accepted and again when it has ended."""

    request: str
    is_accepted: bool
    is_final: bool
    text: str
    number: int = 0


FromOperatorMessage = SwitchoverRequest | StopRequest
