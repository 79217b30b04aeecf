"""What a worker does when its generation breaks, and what it promises when it is frozen.

Decides between running out, holding and going on into the tail (W9, W10), and what a report says
(W12). What happens after the report is the controller's; only its plan changes anything here.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainmover.protocol import exits
from trainmover.protocol.messages import (
    AtBoundary,
    Broken,
    CommitAcknowledged,
    Done,
    Edge,
    FinishPassed,
    FirstGate,
    Freeze,
    InTail,
    Lost,
    PhaseOneFailed,
    PhaseOneReady,
    Report,
    Tracked,
)
from trainmover.units import Instant, after, in_seconds, seconds
from trainmover.worker.events import (
    AbortGeneration,
    BreakGeneration,
    ChannelBroken,
    CloseGates,
    Poisoned,
    RunOutFailed,
    TailStruck,
    UndoStep,
)
from trainmover.worker.lifecycle_state import (
    Accepted,
    Bound,
    Building,
    CuttingOver,
    Ended,
    Failed,
    Finished,
    HeldInGate,
    InGate,
    Leaving,
    NotEntered,
    Offered,
    Parked,
    Prepared,
    Ready,
    Rehearsing,
    Running,
    RunningOut,
    Tail,
    Transition,
    WorkerState,
    answered,
    join,
    marked,
    post,
    stay,
)
from trainmover.worker.lifecycle_step import replace_reason, stop

SWITCH_MESSAGES = (AtBoundary, Done, PhaseOneReady, PhaseOneFailed, Lost)
"""Messages about one open number; void once it is settled."""

# ------------------------------------------------------------------------- breaks


def on_channel_broken(state: WorkerState, event: ChannelBroken, now: Instant) -> Transition:
    """W9, W11: a channel ended."""
    is_new = event.edge.peer not in {edge.peer for edge in state.edges}
    move = _on_break(state, event.generation, (event.edge,), event.edge.peer, now)
    has_more = state.is_broken and len(move.state.edges) > len(state.edges)
    if is_new and has_more and not isinstance(state.main, Failed):
        return _tell_another(move.state, now)
    return move


def _tell_another(state: WorkerState, now: Instant) -> Transition:
    """One more peer is gone: nobody need wait for its report. Told once if frozen already."""
    sends_left = 0 if state.is_frozen else -1
    told = post(state, _broken_of(state, now), now, sends_left)
    return replace_reason(told, "broken already, by one more peer")


def _broken_of(state: WorkerState, now: Instant) -> Broken:
    return Broken(
        incarnation=state.incarnation,
        generation=state.generation,
        step=state.applied.step,
        edges=state.edges,
        detected_at_ns=now,
    )


def on_poisoned(state: WorkerState, event: Poisoned, now: Instant) -> Transition:
    """A peer has marked the generation broken."""
    switch = state.switch
    if isinstance(switch, Prepared) and switch.plan.number == event.generation:
        ahead = replace(switch, broken=switch.broken + event.edges, is_broken_ahead=True)
        return stay(replace(state, switch=ahead), "the next generation is broken already")
    is_planned = isinstance(switch, Prepared | CuttingOver) and switch.plan.kind == "planned"
    if is_planned and event.generation == state.generation:
        return _poisoned_in_cut_over(state, event, now)
    return _on_break(state, event.generation, event.edges, event.peer, now)


def _poisoned_in_cut_over(state: WorkerState, event: Poisoned, now: Instant) -> Transition:
    switch = state.switch
    if isinstance(switch, Prepared):
        return stay(replace(state, switch=replace(switch, is_poisoned=True)), "noted for an abort")
    if isinstance(switch, CuttingOver) and switch.plan.membership.rank_of(event.peer) is None:
        return stay(state, "the leaver's business")
    return break_generation(state, event.edges, now)


def _on_break(
    state: WorkerState, generation: int, edges: tuple[Edge, ...], peer: str, now: Instant
) -> Transition:
    switch = state.switch
    if switch is not None and generation == switch.plan.number:
        return _lose(state, switch.plan.number, edges, now)
    if generation != state.generation or not state.is_member:
        return stay(state, "a break of another generation")
    if state.is_broken:
        known = {edge.peer for edge in state.edges}
        new = tuple(edge for edge in edges if edge.peer not in known)
        return stay(replace(state, edges=state.edges + new), "broken already")
    is_planned = switch is not None and switch.plan.kind == "planned"
    if is_planned and isinstance(switch, CuttingOver | Prepared):
        if switch.plan.membership.rank_of(peer) is None:
            return stay(state, "W11: a channel to a leaver")
        if isinstance(switch, Prepared):
            noted = replace(switch, broken=switch.broken + edges)
            return stay(replace(state, switch=noted), "W11: noted until the commit")
    return break_generation(state, edges, now)


def _lose(state: WorkerState, number: int, edges: tuple[Edge, ...], now: Instant) -> Transition:
    if not edges:
        return stay(state, "no edge named")
    if isinstance(state.switch, Prepared):
        noted = replace(state.switch, broken=state.switch.broken + edges)
        state = replace(state, switch=noted)
    body = Lost(incarnation=state.incarnation, number=number, edge=edges[0])
    return replace_reason(post(state, body, now), "W11: a channel of the next generation broke")


def break_generation(
    state: WorkerState, edges: tuple[Edge, ...], now: Instant, *, is_told: bool = True
) -> Transition:
    """W9: mark the own generation broken, once; run out, hold, or go on to the boundary."""
    if not state.is_member or isinstance(state.main, Ended | Leaving):
        return stay(state, "no generation to break")
    if state.is_broken:
        return stay(state, "broken already")
    moved = marked(replace(state, is_broken=True, edges=edges), "detected", now)
    command = BreakGeneration(generation=state.generation, edges=edges)
    move = Transition(moved, (command,), f"generation {state.generation} is broken")
    if is_told and not isinstance(state.main, Failed):
        told = post(moved, _broken_of(moved, now), now)
        move = Transition(told.state, move.commands + told.commands, move.reason)
    return join(move, leave_gate(move.state, now))


def leave_gate(state: WorkerState, now: Instant) -> Transition:
    """Where a broken or frozen generation leaves `main`: run out, undo, hold."""
    match state.main:
        case Running(step=step):
            return Transition(replace(state, main=RunningOut(step, now)), (), "runs out")
        case Ready(step=step):
            undone = replace(state, main=RunningOut(step, now))
            return Transition(undone, (UndoStep(step=step),), "undoes: it has not entered")
        case InGate(step=step) if not state.follows("hold"):
            undone = replace(state, main=RunningOut(step, now))
            return Transition(undone, (UndoStep(step=step),), "undoes although it has entered")
        case InGate() if state.is_frozen and not state.follows("freeze_closes_gates"):
            return stay(state, "stays in the gate")
        case InGate(step=step, kind=kind):
            return Transition(replace(state, main=HeldInGate(step, kind)), (), "holds")
        case Building():
            return Transition(replace(state, is_build_void=True), (), "builds on, void")
        case _:
            return stay(state, "")


def on_run_out_failed(state: WorkerState, event: RunOutFailed) -> Transition:
    """W10: the attempt does not end by itself: give the process up, it is respawned in place."""
    if isinstance(state.main, RunningOut | Tail | Building):
        return stop(state, exits.INTERRUPTED, f"running out failed: {event.reason}")
    return stay(state, "nothing runs out")


def on_tail_struck(state: WorkerState, event: TailStruck, now: Instant) -> Transition:
    """A value behind the gate was invented: what is left of the tail is a run-out."""
    main = state.main
    if not isinstance(main, Tail) or main.step != event.step or main.is_struck:
        return stay(state, "not in that tail")
    return stay(replace(state, main=Tail(main.step, now, True)), "the tail is cut short")


def has_gap(state: WorkerState, now: Instant) -> bool:
    """Whether so much time has passed since the last event that this process may have been
    stopped."""
    return state.seen_at > 0 and now - state.seen_at > seconds(state.config.pause_limit_s)


def notice_pause(state: WorkerState, now: Instant) -> Transition:
    """W5: a process that was stopped has perhaps been replaced.

    Inside a gate it holds and asks instead of passing. In front of one it only waits a moment with
    its contribution, because a long silence there may as well be the script's doing.
    """
    gap = now - state.seen_at
    if not (has_gap(state, now) and state.is_member and state.follows("pause")):
        return stay(state, "")
    if isinstance(state.main, Running):
        until = after(now, seconds(state.config.confirm_s))
        return stay(replace(state, suspect_until=until), "")
    if not isinstance(state.main, Ready | InGate):
        return stay(state, "")
    move = break_generation(state, (), now)
    return replace_reason(move, f"was stopped for {in_seconds(gap):.1f} s in a gate: asks")


# ------------------------------------------------------------------------- freeze and report


def on_freeze(state: WorkerState, event: Freeze, now: Instant) -> Transition:
    """W12: close all older gates first, settle, then report."""
    number = event.number
    if number == state.promise and state.reported == number:
        return repeat_report(state, now)
    if number <= state.promise or number <= state.generation:
        return stay(state, "an old freeze")
    if isinstance(state.main, Ended | Leaving | Failed):
        return stay(state, "not a member any more")
    dropped = drop_unsettled(state)
    promised = marked(replace(dropped.state, promise=number), "frozen", now)
    move = Transition(
        answered(promised, Broken, FinishPassed, Report, Tracked, FirstGate, CommitAcknowledged),
        (CloseGates(below=number), *dropped.commands),
        f"frozen for {number}",
    )
    if state.is_member:
        broken = break_generation(move.state, (), now, is_told=False)
        if not broken.commands:
            broken = leave_gate(move.state, now)
        move = join(move, broken)
    return join(move, report_if_settled(move.state, now))


def drop_unsettled(state: WorkerState) -> Transition:
    """A number that did not get this worker's Done can't be committed: a newer freeze ends it."""
    switch = state.switch
    if switch is None or isinstance(switch, Prepared):
        return stay(state, "")
    number = switch.plan.number
    moved = replace(answered(state, *SWITCH_MESSAGES), switch=None)
    if isinstance(switch, Accepted):
        return Transition(moved, (), f"{number} is void")
    return Transition(moved, (AbortGeneration(number=number, back_to=0),), f"{number} is void")


def report_if_settled(state: WorkerState, now: Instant) -> Transition:
    """Report once apply and tail of a passed gate are over."""
    is_due = state.promise > state.reported and state.promise > state.generation
    if not is_due or isinstance(state.main, Ended | Leaving | Failed):
        return stay(state, "")
    if isinstance(state.main, Tail) and state.follows("report_after_tail"):
        return _tell_tail(state, now)
    settled = answered(state, InTail)
    reported = marked(replace(settled, reported=state.promise), "reported", now)
    return replace_reason(post(reported, report_of(reported), now), "reports")


def _tell_tail(state: WorkerState, now: Instant) -> Transition:
    """Behind a gate this rank may save or evaluate for long: it says so until it can report."""
    for item in state.outbox:
        if isinstance(item.body, InTail) and item.body.number == state.promise:
            return stay(state, "")
    body = InTail(incarnation=state.incarnation, number=state.promise)
    return replace_reason(post(state, body, now), "reports at the boundary")


def repeat_report(state: WorkerState, now: Instant) -> Transition:
    """The controller asks again: say the same again, unless its plan has come meanwhile."""
    if not any(isinstance(item.body, Report) for item in state.outbox):
        return stay(state, "answered, and acted upon")
    return replace_reason(post(state, report_of(state), now), "reports again")


def report_of(state: WorkerState) -> Report:
    """What W12 asks for."""
    main = state.main
    prepared = state.switch if isinstance(state.switch, Prepared) else None
    has_entered = isinstance(main, HeldInGate | InGate)
    if isinstance(main, Finished):
        has_entered = not main.is_stopped
    is_joiner = prepared is not None and state.incarnation in prepared.plan.joiners
    started = isinstance(main, Running | RunningOut | Ready | InGate | HeldInGate | Tail)
    is_unbuilt = isinstance(main, NotEntered | Rehearsing | Building)
    return Report(
        incarnation=state.incarnation,
        number=state.promise,
        generation=state.generation,
        rank=state.rank if state.is_member else -1,
        prepared_number=prepared.plan.number if prepared is not None else 0,
        applied=prepared.plan.target if prepared is not None and is_joiner else state.applied,
        previous=None if prepared is not None else state.previous,
        has_entered=has_entered,
        last_result=state.last_result,
        broken_state=state.broken_state,
        is_half_rolled_back=state.is_half_rolled_back,
        is_building=state.is_build_void or is_unbuilt,
        identity=state.identity,
        attempts=state.attempts + int(started),
        sequence_digest=state.sequence_digest,
        personal=tuple(sorted(state.personal, key=lambda held: (held.owner_rank, held.version))),
        edges=state.edges,
        has_first_buckets=state.has_first_buckets,
    )


def is_parked_standby(state: WorkerState) -> bool:
    """Whether this worker is a standby that can be given a rank."""
    return not state.is_member and isinstance(state.main, Parked)


IN_A_STEP = frozenset((Running, RunningOut, Ready, InGate, Tail))
"""Places of a `main` that goes on by itself."""


def is_waiting(state: WorkerState) -> bool:
    """Whether only a word of the controller lets this worker go on: a bounded wait (I12)."""
    if type(state.main) in IN_A_STEP:
        return isinstance(state.switch, CuttingOver | Prepared)
    match state.main:
        case Ended() | NotEntered() | Rehearsing() | Parked():
            if state.is_frozen:
                return True
            return state.switch is not None and not isinstance(state.switch, Offered)
        case HeldInGate() | Bound() | Finished() | Failed() | Leaving():
            return True
        case _:
            return isinstance(state.switch, CuttingOver | Prepared)
