"""What the controller knows: machines, workers, the incident under way, and one class per phase.

Pure data. Which phase follows which is decided by the handlers; nothing here looks at a clock.

Phases of the job:

    Forming -> Switching (plan 1) -> Training
    planned:    Training -> Preparing -> Flagged -> Switching -> Training
    unplanned:  (any of those) -> Freezing -> Gathering -> Switching -> Training
    end:        Training -> Finishing -> Completing -> Ending -> Ended
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainmover.controller.config import Config
from trainmover.controller.events import Command
from trainmover.controller.kept import START, Kept
from trainmover.protocol.journal import Culprit, IncidentReport, RankMarks
from trainmover.protocol.messages import (
    Done,
    Facts,
    JobSpec,
    Plan,
    RecordingStored,
    Rehearsal,
    Report,
    RoleClass,
    StandbyReady,
    Version,
    WorkerStatus,
)
from trainmover.topology import Member, Membership
from trainmover.units import Instant

NO_FACTS = Facts()

# --------------------------------------------------------------------------- machines and workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A host as far as its agent has told."""

    name: str
    agent: str = ""
    """Incarnation of the agent's process; empty: never heard of in this term."""
    is_linked: bool = False
    heard_at: Instant
    unlinked_at: Instant | None = None
    """When its link closed; None while it is up, and before it was up in this term."""
    facts: Facts = NO_FACTS
    labels: tuple[tuple[str, str], ...] = ()
    registered_at: Instant | None = None
    """Of its last hello; None: not in this term."""
    is_leaving: bool = False
    leave_by: Instant | None = None
    """When it is taken away, as far as anybody has said."""
    is_retired: bool = False
    """Refused or released for good: no worker is launched there any more."""
    is_lost: bool = False
    """Its agent is silent; it comes back by saying hello."""
    launch_failures: int = 0
    reason: str = ""
    """Why it is not usable, for people."""


WorkerRole = Literal["starting", "standby", "member", "leaver", "ending"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """One process life of a worker that is not known to be over."""

    incarnation: str
    machine: str
    local_rank: int
    launched_at: Instant
    role: WorkerRole = "starting"
    """`ending`: killed, fenced or released; its exit is awaited."""
    host: str = ""
    port: int = 0
    facts: Facts = NO_FACTS
    as_rank: int = -1
    """Rank a standby was told to build as; -1: not told yet."""
    readiness: StandbyReady | None = None
    rehearsals: tuple[Rehearsal, ...] | None = None
    """Classes a standby was told to walk through (none: loop-back); None: waits for recordings."""
    ordered_at: Instant | None = None
    """When a standby was told to build."""
    ready_at: Instant | None = None
    """When it was a standby that can join."""
    calm_step_s: float = 0.0
    """Median step of the job before that; 0: not known."""
    busy_steps_s: tuple[float, ...] = ()
    """Steps of the job while it rehearsed, the latest last (see `pace`)."""
    reason: str = ""
    """Why a standby is not usable, or why it is ending."""
    ending_since: Instant | None = None
    released_number: int = 0
    """Generation that a leaver made room for; 0: it is killed instead of released."""
    status: WorkerStatus | None = None
    missing_since: Instant | None = None
    stopped_since: Instant | None = None

    @property
    def is_up(self) -> bool:
        """Whether its channels listen."""
        return bool(self.host)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """The latest look at the job's progress, and how long steps take while nobody rehearses."""

    generation: int = 0
    gate: int = -1
    at: Instant | None = None
    calm: tuple[float, ...] = ()


# --------------------------------------------------------------------------- incident in progress

Origin = Literal["", "snapshot", "checkpoint"]
"""What all ranks were put back to; empty: nothing of the kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """Record under way, from first sign to the first gate of the new generation."""

    base_generation: int
    is_planned: bool
    reason: str
    started_at: Instant
    culprits: tuple[Culprit, ...] = ()
    phases: tuple[tuple[str, Instant], ...] = ()
    waited: tuple[tuple[str, str], ...] = ()
    """Phase and who was the last to be waited for in front of it."""
    before: tuple[Member, ...] = ()
    """Members of the base generation, by rank."""
    dones: tuple[Done, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    """Failed edges between members as (lower rank, higher rank)."""
    elsewhere: tuple[int, ...] = ()
    """Ranks whose machine is to blame: not respawned in place."""
    steps_repeated: int = 0
    origin: Origin = ""
    served: tuple[tuple[int, str], ...] = ()
    """Rank and machine whose agent gave its snapshot."""
    first_gate_at: Instant | None = None
    request: str = ""
    """Operator's request that it answers."""


# --------------------------------------------------------------------------- phases


@dataclass(frozen=True, kw_only=True, slots=True)
class Forming:
    """No generation yet: machines register, workers start."""

    deadline: Instant
    complete_since: Instant | None = None
    """When enough machines had registered."""
    active: tuple[str, ...] = ()
    """Chosen machines in rank order; empty: not chosen."""
    tries: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The committed generation trains; the controller is not needed for it."""

    unacknowledged: tuple[str, ...] = ()
    """Members that have not confirmed the commit."""
    has_passed_gate: bool = False
    untracked: tuple[str, ...] = ()
    """Members that still build `main` (fresh start)."""
    committed_at: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparing:
    """Phase one of a planned switchover."""

    plan: Plan
    waiting: tuple[str, ...]
    """Incarnations whose PhaseOneReady is awaited."""
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Flagged:
    """The flag is up; the first rank to stop names the boundary."""

    plan: Plan
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Switching:
    """A plan with a target is out; Done of every member (planned: and leaver) is awaited."""

    plan: Plan
    dones: Mapping[str, Done] = field(default_factory=dict)
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Freezing:
    """Reports are awaited; nothing of the old generation can change once they are in."""

    number: int
    reports: Mapping[str, Report] = field(default_factory=dict)
    tails: Mapping[str, Instant] = field(default_factory=dict)
    """Members that are behind a gate and will report at the boundary: when they last said so."""
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A lost rank and who is to take it."""

    rank: int
    way: Literal["respawn", "standby"]
    incarnation: str = ""
    """Worker meant for it; empty: none yet."""
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathering:
    """Reports are in; joiners for lost ranks are being found or started."""

    number: int
    reports: Mapping[str, Report]
    seats: tuple[Seat, ...]
    since: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Finishing:
    """Some rank has passed the finish gate: all have done all steps."""

    passed: tuple[str, ...]
    step: int
    is_stopped: bool
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Completing:
    """COMPLETE is journaled; workers end by themselves."""

    is_stopped: bool
    deadline: Instant
    saves_until: Instant | None = None
    """How long the last state of a stopped job may take to be durable; None: it is not saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The reason is journaled; agents are told to stop."""

    code: int
    reason: str
    told: tuple[str, ...]
    """Machines whose link is not closed yet."""
    deadline: Instant
    saves_until: Instant | None = None
    """How long agents stay to make the newest good snapshot durable first; None: not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Nothing happens any more."""

    code: int
    reason: str


Phase = (
    Forming
    | Training
    | Preparing
    | Flagged
    | Switching
    | Freezing
    | Gathering
    | Finishing
    | Completing
    | Ending
    | Ended
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptFailure:
    """An exception of the script that waits for earlier ones."""

    rank: int
    step: int
    error: str
    text: str
    machine: str
    deadline: Instant


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """A planned switchover that has been accepted and not begun."""

    request: str
    machines: tuple[str, ...]
    to: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Classes:
    """Role classes as the members' first iterations have shown them."""

    by_rank: Mapping[int, RoleClass] = field(default_factory=dict)
    stored: Mapping[str, RecordingStored] = field(default_factory=dict)
    """What became of the recording of each class, by its digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything the controller knows. Mappings are never changed in place."""

    config: Config
    spec: JobSpec
    term: int
    phase: Phase
    machines: Mapping[str, Machine] = field(default_factory=dict)
    workers: Mapping[str, Worker] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    """Worker incarnations that must never act again; asked only by membership, never iterated."""
    membership: Membership | None = None
    """Of the committed generation."""
    target: Version = START
    """Version at which the committed generation started."""
    is_fresh: bool = False
    """Whether the committed generation was a fresh start."""
    identities: tuple[str, ...] = ()
    classes: Classes = Classes()
    kept: Kept = field(default_factory=Kept)
    """Snapshots and checkpoints."""
    facts: Facts | None = None
    """What every machine must equal."""
    highest_number: int = 0
    launch_count: int = 0
    incident: Incident | None = None
    incident_count: int = 0
    closed: tuple[IncidentReport, ...] = ()
    tries: Mapping[str, int] = field(default_factory=dict)
    """Recoveries of one kind for one rank at one step, by a key of the three."""
    wish: Wish | None = None
    is_stop_wanted: bool = False
    stop_by: Instant | None = None
    """When the job has to have ended, saved or not; None: it has time."""
    failure: ScriptFailure | None = None
    started_at: Instant
    moved_at: Instant
    """Instant of the latest event: a long gap means that this process was stopped itself."""
    resend_at: Instant
    step: int = 0
    """Highest step any rank is known to have entered; for people."""
    progress_gate: int = -1
    progress_at: Instant
    pace: Pace = Pace()

    @property
    def generation(self) -> int:
        """Number of the committed generation; 0 before the first."""
        return self.membership.generation if self.membership is not None else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """Result of one move of the decider."""

    state: State
    commands: tuple[Command, ...]
    reason: str
