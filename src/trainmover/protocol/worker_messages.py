"""Messages between a worker and the controller; an agent hands them on unchanged."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainmover.protocol.carried import (
    ChannelCount,
    Edge,
    Facts,
    Held,
    Mark,
    Message,
    Plan,
    Traffic,
    Version,
)
from trainmover.protocol.end_messages import Complete, Fence, Release, StopAtBoundary, StopNow
from trainmover.protocol.rehearsal_messages import (
    Coverage,
    KeepRecording,
    RecordingStored,
    Rehearsal,
    RoleClass,
)
from trainmover.protocol.snapshot_messages import (
    CadenceChosen,
    CostsMeasured,
    LossAlarm,
    SnapshotFailed,
    SnapshotTaken,
    TakeSnapshot,
)

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
    classes: tuple[str, ...] = ()
    """Role classes it has rehearsed; the one it is built as comes last."""
    answers: str = "loopback"
    """How crossing collectives were answered: recorded, loopback or zeros."""
    has_first_buckets: bool = False
    """Some DDP module has not laid out its buckets anew yet."""


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
    previous: Version | None = None
    """Version in front of the last gate, if this worker can still go back to it."""
    has_entered: bool = False
    """Whether it has contributed to the gate of step `applied.step`."""
    last_result: tuple[int, ...] = ()
    """Merged flags of the gate of step applied.step - 1, if passed in this process."""
    broken_state: str = ""
    """Names what a collective after the gate may have spoilt; empty: state is clean. Means nothing
    where `prepared_number` turns out to be committed: the state is that number's then."""
    is_half_rolled_back: bool = False
    """Took up a roll-back, or left `main` to enter it anew, and that was not committed: its state
    is good for another of these only."""
    is_building: bool = False
    """`main` has not reached its first boundary."""
    identity: str = ""
    attempts: int = 0
    sequence_digest: str = ""
    personal: tuple[Held, ...] = ()
    edges: tuple[Edge, ...] = ()
    has_first_buckets: bool = False
    """Some DDP module has not laid out its buckets anew yet, or has been told to start over."""


class InTail(Message, frozen=True, kw_only=True):
    """Answer to `Freeze(number)` of a rank that is behind a gate and not at a boundary yet: it
    saves, evaluates or updates, and reports when that is over. Repeated until then."""

    incarnation: str
    number: int


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
    traffic: Traffic | None = None
    """What it exchanged while it could not train; None where it joined."""


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
    is_again: bool = False
    """By whoever took the primary's place, who can't know whether it was told: what is known of
    this step already, such as a value logged again behind the gate, stands."""


class Finding(Message, frozen=True, kw_only=True):
    """Something the user should know, with file and line. Not for the decider."""

    incarnation: str
    rank: int
    kind: str
    text: str


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """One value that should have been the same twice."""

    name: str
    recorded: str
    found: str


class RestoreChecked(Message, frozen=True, kw_only=True):
    """What a check behind a restore has compared. Not for the decider.

    By a rank that was restored; or by the controller, of losses of steps that were done again.
    """

    incarnation: str
    rank: int
    generation: int
    step: int
    source: str
    compared: int
    """Values beside the digests of all tensors."""
    differing: tuple[Differing, ...] = ()
    text: str = ""


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
    | InTail
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
    | SnapshotTaken
    | SnapshotFailed
    | LossAlarm
    | CadenceChosen
    | RoleClass
    | RecordingStored
    | Coverage
    | RestoreChecked
)


# --------------------------------------------------------------------------- controller -> worker


class BecomeStandby(Message, frozen=True, kw_only=True):
    """Build `main` as `as_rank` in loop-back and park at a boundary."""

    term: int
    as_rank: int
    world_size: int
    rehearsals: tuple[Rehearsal, ...] = ()
    """Classes to walk through with their recordings, `as_rank`'s last; empty: loop-back."""


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
    | TakeSnapshot
    | CostsMeasured
    | KeepRecording
)
