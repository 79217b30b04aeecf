"""State of one worker's lifecycle: where `main` is, which switchover is open, what is unanswered.

Decides nothing: the handlers in the other `lifecycle_*` modules move this state, and
`lifecycle.transition` dispatches to them. One frozen dataclass per place `main` can be in, one per
stage of an open switchover; both are independent: training goes on while one is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from trainmover.errors import ConfigError
from trainmover.protocol.messages import Edge, Facts, FromWorkerBody, Held, Mark, Plan, Version
from trainmover.topology.membership import Membership
from trainmover.units import Instant, seconds
from trainmover.worker.events import AnyCommand, Send

START = Version(step=0)
NEVER = Instant(0)

MUTABLE_RULES = (
    "freeze_closes_gates",
    "hold",
    "hold_back",
    "finish",
    "report_after_tail",
    "promise",
    "wait_for_commit",
    "pause",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LifecycleConfig:
    """Time-outs of one worker. All in seconds on the worker's own monotonic clock."""

    gate_timeout_s: float = 700.0
    """Longest wait in a gate before the generation counts as broken although no channel is (W9):
    the last resort, above what `communicator.collective_timeout_s` and `outside_step_limit_s` find
    by asking. Shorter ends sooner what those two miss; it must tolerate a rank that saves."""
    run_out_timeout_s: float = 10.0
    """Longest running out before the worker gives itself up and is respawned in place (W10); twice
    the last step's time where that is more."""
    build_timeout_s: float = 1800.0
    """Longest way of `main` to its first boundary."""
    tail_timeout_s: float = 600.0
    """Longest way from a gate to the next boundary once a peer is lost (a save, an evaluation);
    where a collective there was cut short, `run_out_timeout_s` counts."""
    controller_timeout_s: float = 240.0
    """Longest wait without a word from the controller where only it can decide (W15)."""
    resend_interval_s: float = 1.0
    """Unanswered messages are repeated after this."""
    standby_resend_interval_s: float = 5.0
    """`StandbyReady` has no answer; a restarted controller learns of it within this."""
    pause_limit_s: float = 8.0
    """A process that was stopped longer than this inside a gate has perhaps been replaced: it holds
    and asks instead of passing (W5). Under the time in which a silent machine is declared lost."""
    confirm_s: float = 0.5
    """A process that was stopped in front of a gate reads for this long what its peers have to say
    before it contributes: poison and closed channels of those who went on without it."""
    without: tuple[str, ...] = ()
    """Rules switched off; only the simulation's mutation check sets it."""

    def __post_init__(self) -> None:
        names = [name for name in self.__dataclass_fields__ if name.endswith("_s")]
        positive = {name: getattr(self, name) for name in names}
        for name, value in positive.items():
            if value <= 0:
                raise ConfigError(f"worker.{name} must be above 0, is {value}")
        pairs = (
            ("resend_interval_s", "controller_timeout_s"),
            ("run_out_timeout_s", "controller_timeout_s"),
            ("pause_limit_s", "gate_timeout_s"),
            ("pause_limit_s", "controller_timeout_s"),
        )
        for low, high in pairs:
            if positive[low] >= positive[high]:
                text = f"worker.{low} ({positive[low]}) must be below worker.{high}"
                raise ConfigError(f"{text} ({positive[high]})")
        for rule in self.without:
            if rule not in MUTABLE_RULES:
                raise ConfigError(f"no rule is named {rule}; known: {', '.join(MUTABLE_RULES)}")


# ------------------------------------------------------------------------- where `main` is


@dataclass(frozen=True, slots=True)
class NotEntered:
    """No `main` runs."""


@dataclass(frozen=True, slots=True)
class Building:
    """`main` runs live and has not reached its first boundary."""

    since: Instant


@dataclass(frozen=True, slots=True)
class Rehearsing:
    """A standby's `main` runs in loop-back and has not parked yet."""

    as_rank: int
    since: Instant


@dataclass(frozen=True, slots=True)
class Parked:
    """A standby's `main` is built and waits at a boundary."""

    as_rank: int


@dataclass(frozen=True, slots=True)
class Bound:
    """BOUND(step): at the top of `step`, waiting for leave to run it."""

    step: int


@dataclass(frozen=True, slots=True)
class Running:
    """RUN(step): in front of the gate."""

    step: int
    since: Instant


@dataclass(frozen=True, slots=True)
class Ready:
    """READY(step): gradients complete; the contribution waits for wards' personal state."""

    step: int
    kind: int
    flags: tuple[int, ...]
    since: Instant


@dataclass(frozen=True, slots=True)
class InGate:
    """GATE(step): contributed."""

    step: int
    kind: int
    since: Instant


@dataclass(frozen=True, slots=True)
class HeldInGate:
    """HELD(step): contributed, then broken or frozen; gradients kept until APPLY or UNDO."""

    step: int
    kind: int


@dataclass(frozen=True, slots=True)
class Tail:
    """PASSED(step) and TAIL(step): applying, then the script's tail."""

    step: int
    since: Instant
    is_struck: bool = False


@dataclass(frozen=True, slots=True)
class RunningOut:
    """RUN_OUT(step): the attempt is void; `main` comes back to the boundary of `step`."""

    step: int
    since: Instant


@dataclass(frozen=True, slots=True)
class Finished:
    """FINISH: every rank has done all steps (or stops here by request); waits for COMPLETE."""

    step: int
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """`main` raised; the controller decides what that means for the job."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Out of the committed generation, state kept until RELEASE (finding 21)."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The process ends; nothing is decided here any more."""


Main = (
    NotEntered
    | Building
    | Rehearsing
    | Parked
    | Bound
    | Running
    | Ready
    | InGate
    | HeldInGate
    | Tail
    | RunningOut
    | Finished
    | Failed
    | Leaving
    | Ended
)

# ------------------------------------------------------------------------- open switchover


class Offered(msgspec.Struct, frozen=True):
    """A planned switchover is prepared in the background; training goes on."""

    plan: Plan
    is_ready: bool = False
    """Phase one is done here."""
    is_targeted: bool = False
    """The controller has fixed the target (PlanIssued): cut over at that boundary."""


class Accepted(msgspec.Struct, frozen=True):
    """The plan stands; `main` is on its way to the boundary of the target."""

    plan: Plan


class CuttingOver(msgspec.Struct, frozen=True):
    """The runtime swaps channels and moves state."""

    plan: Plan
    broken: tuple[Edge, ...] = ()


class Prepared(msgspec.Struct, frozen=True):
    """PREPARED: neither aborts nor commits by itself (W15)."""

    plan: Plan
    broken: tuple[Edge, ...] = ()
    """Channels to members of the plan that broke since: reported after the commit (W11)."""
    is_poisoned: bool = False
    """The base generation was marked broken by a peer: matters only after an abort."""
    is_broken_ahead: bool = False
    """A peer runs in the next generation and has marked it broken: matters after the commit."""


Switch = Offered | Accepted | CuttingOver | Prepared


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that has not been answered."""

    body: FromWorkerBody
    sent_at: Instant
    sends_left: int
    """-1: repeated until answered; else this many times more, for messages without an answer."""


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one worker's lifecycle knows."""

    config: LifecycleConfig
    incarnation: str
    facts: Facts = msgspec.field(default_factory=Facts)
    term: int = 0
    """Highest term seen; lower ones are ignored."""
    promise: int = 0
    """No gate of a lower generation passes here any more (W12)."""
    reported: int = 0
    """Highest number answered with a report."""
    generation: int = 0
    """Committed generation this worker is a member of; 0: none."""
    membership: Membership | None = None
    rank: int = -1
    wards: tuple[int, ...] = ()
    applied: Version = START
    previous: Version | None = None
    """Version in front of the gate passed last, while this process can go back to it."""
    last_result: tuple[int, ...] = ()
    """Result of gate applied.step - 1, if passed in this process."""
    is_broken: bool = False
    edges: tuple[Edge, ...] = ()
    broken_state: str = ""
    is_half_rolled_back: bool = False
    """A roll-back or a start anew is taken up: until it is committed, only another one can be."""
    is_build_void: bool = False
    """The generation broke before the first boundary: what `main` has built is worthless."""
    is_first_gate_passed: bool = False
    identity: str = ""
    names_digest: int = 0
    attempts: int = 0
    sequence_digest: str = ""
    can_adopt_in_place: bool = True
    has_first_buckets: bool = False
    personal: tuple[Held, ...] = ()
    main: Main = NotEntered()
    switch: Switch | None = None
    flag: int = 0
    """Number to carry in the next gate (RaiseFlag)."""
    is_stop_requested: bool = False
    snapshot_wanted: int = 0
    """Level of the snapshot that the next gate asks for (TakeSnapshot)."""
    highest_aborted: int = 0
    """Numbers grow and at most one is open, so any lower flagged number is settled too."""
    outbox: tuple[Outgoing, ...] = ()
    is_link_up: bool = True
    heard_at: Instant = NEVER
    """Last word of the controller."""
    waiting_since: Instant | None = None
    """Since when only the controller can decide what comes next."""
    link_down_since: Instant | None = None
    seen_at: Instant = NEVER
    """Last event of any kind: a gap in front of the next one means this process was stopped."""
    suspect_until: Instant = NEVER
    """This process was stopped: it contributes to no gate before this instant."""
    step_time_ns: int = 0
    marks: tuple[Mark, ...] = ()

    @property
    def is_member(self) -> bool:
        """Whether this worker plays a rank of a committed generation."""
        return self.generation > 0

    @property
    def is_frozen(self) -> bool:
        """Whether gates of the own generation are closed for good."""
        return self.is_member and self.promise > self.generation

    def follows(self, rule: str) -> bool:
        """Whether `rule` is on; always, except in the simulation's mutation check."""
        return rule not in self.config.without


class Transition(msgspec.Struct, frozen=True):
    """Result of one event."""

    state: WorkerState
    commands: tuple[AnyCommand, ...]
    reason: str


# ------------------------------------------------------------------------- small moves


def stay(state: WorkerState, reason: str) -> Transition:
    """Nothing to do."""
    return Transition(state, (), reason)


def join(first: Transition, second: Transition) -> Transition:
    """Both moves, in order, under the reasons of both."""
    reasons = f"{first.reason}; {second.reason}" if second.reason else first.reason
    return Transition(second.state, first.commands + second.commands, reasons)


def post(
    state: WorkerState, body: FromWorkerBody, now: Instant, sends_left: int = -1
) -> Transition:
    """Send `body` and keep it for repetition; it replaces an earlier one of its type."""
    kept = tuple(item for item in state.outbox if type(item.body) is not type(body))
    if sends_left != 0:
        kept = (*kept, Outgoing(body, now, sends_left))
    return Transition(replace(state, outbox=kept), (Send(body=body),), "")


def answered(state: WorkerState, *types: type[FromWorkerBody]) -> WorkerState:
    """Without the unanswered messages of `types`."""
    kept = tuple(item for item in state.outbox if not isinstance(item.body, types))
    return state if len(kept) == len(state.outbox) else replace(state, outbox=kept)


def marked(state: WorkerState, name: str, now: Instant) -> WorkerState:
    """With the instant of `name` noted for the incident report; the first one of a name counts."""
    if any(mark.name == name for mark in state.marks):
        return state
    return replace(state, marks=(*state.marks, Mark(name=name, at_ns=now)))


def run_out_limit_ns(state: WorkerState) -> int:
    """Longest running out: the configured time, or twice the last step's."""
    return max(seconds(state.config.run_out_timeout_s), 2 * state.step_time_ns)


def holds_wards(state: WorkerState, step: int) -> bool:
    """W3: whether personal state of `step` of every ward is held, of this generation's gate."""
    if state.membership is None or not state.follows("hold_back"):
        return True
    version = Version(step=step, lineage=state.generation)
    held = {item.owner_rank for item in state.personal if item.version == version}
    return held.issuperset(state.wards)
