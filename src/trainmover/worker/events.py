"""What the worker's lifecycle decider sees and what it asks for. Pure data.

Messages of the controller (`ToWorkerBody`) are events as they are. The rest comes from this
process: its main thread (which runs the user's script) and its I/O thread (channels, gate).
The runtime (worker/runtime.py) feeds events one at a time and carries out commands in order; the
simulation does the same with a fake training step.

Main thread's path through one step, as events:

    BoundaryReached(k) -> [Proceed(k)] -> ... -> GateRequested(k) -> [ContributeGate(k)]
        -> GateCompleted(k) -> [ApplyGate(k)] -> tail -> BoundaryReached(k+1)
    after a break in front of the gate:  ... (runs out, undoes) -> BoundaryReached(k)
    after a break inside the gate (HELD): [ApplyGate(k)] or [UndoStep(k)]
"""

from __future__ import annotations

import msgspec

from trainmover.protocol.messages import (
    ChannelCount,
    CostsMeasured,
    Edge,
    FromWorkerBody,
    Held,
    KeepRecording,
    Mark,
    Plan,
    Rehearsal,
    Version,
)


class LocalEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of events that arise in the worker's own process (past tense)."""


class Started(LocalEvent, frozen=True, kw_only=True):
    """The process runs and its channels listen; carry on with `Announce`."""

    host: str
    port: int
    pid: int


class BoundaryReached(LocalEvent, frozen=True, kw_only=True):
    """Main thread is at the top of step `step` with exactly that version and waits.

    Sent again for the same step after an undo. For a standby (loop-back) it means built and parked.
    """

    step: int
    identity: str = ""
    names_digest: int = 0
    attempts: int = 0
    """Attempts of steps started in this process since `main` was entered."""
    sequence_digest: str = ""
    """Digest of the settled collective sequence; empty while it still changes."""
    broken_state: str = ""
    """Names what an invented value after the gate has changed; empty when state is clean."""
    can_go_back: bool = False
    """What this rank had in front of the gate passed last is kept."""
    can_adopt_in_place: bool = True
    reason: str = ""
    seconds: float = 0.0
    classes: tuple[str, ...] = ()
    """Standby: role classes it has rehearsed, the one it is built as last."""
    answers: str = "loopback"
    """Standby: how crossing collectives were answered."""
    has_first_buckets: bool = False
    """Some DDP module has not laid out its buckets anew yet."""


class GateRequested(LocalEvent, frozen=True, kw_only=True):
    """Gradients complete, personal state sent to both backups, no invented value (W2). Waits."""

    step: int
    kind: int
    flags: tuple[int, ...]


class MainFailed(LocalEvent, frozen=True, kw_only=True):
    """The user's `main` raised and it can't be undone."""

    rank: int
    step: int
    text: str
    error: str
    was_running_out: bool
    is_machine_caused: bool


class TailStruck(LocalEvent, frozen=True, kw_only=True):
    """A collective behind the gate of `step` was cut short: the tail only runs out from here."""

    step: int


class RunOutFailed(LocalEvent, frozen=True, kw_only=True):
    """An attempt could not be ended by itself: exception half-way through backward, or deadline."""

    reason: str


class PersonalReceived(LocalEvent, frozen=True, kw_only=True):
    """Personal state of a ward is held here."""

    held: Held


class GateCompleted(LocalEvent, frozen=True, kw_only=True):
    """All rounds of the gate are in; `vector` is the merged result."""

    generation: int
    step: int
    kind: int
    vector: tuple[int, ...]


class ChannelBroken(LocalEvent, frozen=True, kw_only=True):
    """A channel of `generation` ended."""

    generation: int
    edge: Edge


class Poisoned(LocalEvent, frozen=True, kw_only=True):
    """A peer has marked `generation` broken."""

    generation: int
    peer: str
    edges: tuple[Edge, ...] = ()


class NextGenerationFrame(LocalEvent, frozen=True, kw_only=True):
    """A peer already runs in `generation`, for which we are PREPARED: it is committed."""

    generation: int


class PhaseOneDone(LocalEvent, frozen=True, kw_only=True):
    """Channels the plan adds are open (and, on a joiner, `main` is built as its rank)."""

    number: int


class PhaseOneBroke(LocalEvent, frozen=True, kw_only=True):
    """Phase one failed here."""

    number: int
    edge: Edge


class CutOverDone(LocalEvent, frozen=True, kw_only=True):
    """Channels swapped, MARKs in, state complete and verified (W14)."""

    number: int
    version: Version
    identity: str = ""
    bulk_digest: int = 0
    shared_digest: int = 0
    channels: ChannelCount = ChannelCount()
    bytes_received: int = 0
    adopted: str = ""
    marks: tuple[Mark, ...] = ()


class CutOverBroke(LocalEvent, frozen=True, kw_only=True):
    """The cut-over can't be completed because of one peer."""

    number: int
    edge: Edge


class LinkDown(LocalEvent, frozen=True, kw_only=True):
    """The control path to the agent is gone."""


class LinkUp(LocalEvent, frozen=True, kw_only=True):
    """The control path is back; unanswered messages are sent again."""


class Tick(LocalEvent, frozen=True, kw_only=True):
    """Time has passed."""


Local = (
    Started
    | BoundaryReached
    | GateRequested
    | MainFailed
    | TailStruck
    | RunOutFailed
    | PersonalReceived
    | GateCompleted
    | ChannelBroken
    | Poisoned
    | NextGenerationFrame
    | PhaseOneDone
    | PhaseOneBroke
    | CutOverDone
    | CutOverBroke
    | LinkDown
    | LinkUp
    | Tick
)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of commands (imperative)."""


class Send(Command, frozen=True, kw_only=True):
    """To the controller, through the agent."""

    body: FromWorkerBody


class EnterMain(Command, frozen=True, kw_only=True):
    """Call the user's `main` (again) on the main thread, as `rank` of `world_size`.

    is_loopback: as a standby; else live in the committed generation. A main that runs already is
    unwound first. `attempts`: loop-back iterations before parking (joiner); -1: until settled.
    """

    rank: int
    world_size: int
    is_loopback: bool
    attempts: int = -1
    version: int = 0
    """Joiner: where the others stand; in a step of several parts each part is a version."""
    rehearsals: tuple[Rehearsal, ...] = ()
    """Standby: classes to walk through, one entry each; the last is `rank`'s."""


class Proceed(Command, frozen=True, kw_only=True):
    """Main thread may run step `step` from its boundary."""

    step: int


class ContributeGate(Command, frozen=True, kw_only=True):
    """Send this rank's flags for gate `step` of the current generation (W3 holds)."""

    step: int
    kind: int
    flags: tuple[int, ...]


class ApplyGate(Command, frozen=True, kw_only=True):
    """Gate `step` has passed with `vector`: main thread goes on into the optimizer and the tail."""

    step: int
    kind: int
    vector: tuple[int, ...]


class UndoStep(Command, frozen=True, kw_only=True):
    """Gate `step` did not pass: main thread undoes and comes back to the boundary of `step`."""

    step: int


class BreakGeneration(Command, frozen=True, kw_only=True):
    """Run out: outstanding collectives end with valid values, POISON goes to all peers."""

    generation: int
    edges: tuple[Edge, ...] = ()


class CloseGates(Command, frozen=True, kw_only=True):
    """No gate of a generation below `below` delivers any more (freeze)."""

    below: int


class PreparePhaseOne(Command, frozen=True, kw_only=True):
    """Open what `plan` adds; on a joiner also build `main` as its rank. In the background."""

    plan: Plan


class CutOver(Command, frozen=True, kw_only=True):
    """Swap channels, then serve or receive state as `plan` says, re-seed backups (W14).

    Main thread is at the boundary of `plan.target.step` (a joiner: parked; fresh start: anywhere).
    """

    plan: Plan


class CommitGeneration(Command, frozen=True, kw_only=True):
    """Run in `number`: free the old generation, drop personal state above the target."""

    number: int
    target_step: int


class AbortGeneration(Command, frozen=True, kw_only=True):
    """Forget `number`; `back_to` is the generation that is current again (0: stay frozen)."""

    number: int
    back_to: int


class LeaveMain(Command, frozen=True, kw_only=True):
    """Leaver: end `main` through `Left`, keep state served until then."""

    reason: str


class FinishMain(Command, frozen=True, kw_only=True):
    """All ranks have finished (COMPLETE): `main` may return and the process may end."""


class LearnCosts(Command, frozen=True, kw_only=True):
    """The cadence of snapshots goes by these from now on."""

    costs: CostsMeasured


class DecideRecording(Command, frozen=True, kw_only=True):
    """The controller has chosen who keeps the recording of this rank's class."""

    order: KeepRecording


class StopWorker(Command, frozen=True, kw_only=True):
    """Close all channels and end this process with `code` for one reason."""

    code: int
    reason: str
    is_fenced: bool = False


AnyCommand = (
    Send
    | EnterMain
    | Proceed
    | ContributeGate
    | ApplyGate
    | UndoStep
    | BreakGeneration
    | CloseGates
    | PreparePhaseOne
    | CutOver
    | CommitGeneration
    | AbortGeneration
    | LeaveMain
    | FinishMain
    | DecideRecording
    | LearnCosts
    | StopWorker
)
