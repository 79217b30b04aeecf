"""One step of a member: boundary, gate, result, finish; and how the main thread comes and goes.

Decides when this rank contributes to a gate (W3), what a passed gate means (W5, W8) and what
happens at each boundary. Breaks, freezes and plans are decided elsewhere; a boundary only picks up
what they left behind.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainmover.protocol import exits, flags
from trainmover.protocol.messages import (
    AtBoundary,
    FinishPassed,
    FirstGate,
    ScriptFailed,
    StandbyFailed,
    StandbyReady,
    Tracked,
    Version,
)
from trainmover.units import Instant
from trainmover.worker.events import (
    ApplyGate,
    BoundaryReached,
    ContributeGate,
    CutOver,
    GateCompleted,
    GateRequested,
    MainFailed,
    PersonalReceived,
    Proceed,
    StopWorker,
    UndoStep,
)
from trainmover.worker.lifecycle_back import gone_back, repeating
from trainmover.worker.lifecycle_state import (
    Accepted,
    Bound,
    Building,
    CuttingOver,
    Ended,
    Failed,
    Finished,
    InGate,
    Offered,
    Parked,
    Ready,
    Rehearsing,
    Running,
    RunningOut,
    Tail,
    Transition,
    WorkerState,
    holds_wards,
    join,
    marked,
    post,
    stay,
)

UNANSWERED_SENDS = 5
"""Repetitions of a message that has no answer."""


def stop(state: WorkerState, code: int, reason: str) -> Transition:
    """End this process for one reason; its agent reports the exit."""
    ended = replace(state, main=Ended(), outbox=())
    return Transition(ended, (StopWorker(code=code, reason=reason),), reason)


def run_step(state: WorkerState, now: Instant) -> Transition:
    """Let `main` run the step it is waiting in front of."""
    step = state.applied.step
    return Transition(
        replace(state, main=Running(step, now)), (Proceed(step=step),), f"runs step {step}"
    )


# ------------------------------------------------------------------------- boundaries


def on_boundary(state: WorkerState, event: BoundaryReached, now: Instant) -> Transition:
    """`main` is at the top of a step, or a standby is parked."""
    match state.main:
        case Rehearsing(as_rank=rank):
            return _parked(_noted(state, event), rank, event, now)
        case Parked(as_rank=rank):
            return stay(_noted(state, event), "rebuilt while parked")
        case Building():
            return _built(_noted(state, event), event, now)
        case Tail(step=step) if event.step == step + 1:
            lineage = state.generation
            broken = state.broken_state or event.broken_state
            moved = replace(
                _noted(state, event),
                main=Bound(event.step),
                applied=Version(step=event.step, lineage=lineage),
                previous=state.applied if event.can_go_back else None,
                broken_state=broken,
            )
            return arrive(drop_old_personal(moved), now)
        case Tail(step=step) if event.step == step:
            # A collective behind the gate was cut short: state is as in front of the gate again.
            undone = replace(repeating(_noted(state, event)), main=Bound(step))
            return arrive(marked(undone, "run_out", now), now)
        case RunningOut(step=step) if event.step == step:
            moved = marked(replace(_noted(state, event), main=Bound(step)), "run_out", now)
            return arrive(moved, now)
        case Bound(step=step) if event.step == step:
            return stay(_noted(state, event), "at this boundary already")
        case Tail() | RunningOut() | Running() | Ready() | InGate():
            text = f"main came to the boundary of step {event.step} out of turn"
            return stop(state, exits.PROTOCOL_FAILED, text)
        case _:
            return stay(state, "this main is not waited for")


def _noted(state: WorkerState, event: BoundaryReached) -> WorkerState:
    return replace(
        state,
        identity=event.identity or state.identity,
        names_digest=event.names_digest or state.names_digest,
        attempts=event.attempts,
        sequence_digest=event.sequence_digest,
        can_adopt_in_place=event.can_adopt_in_place,
        has_first_buckets=event.has_first_buckets,
    )


def _parked(state: WorkerState, rank: int, event: BoundaryReached, now: Instant) -> Transition:
    ready = StandbyReady(
        incarnation=state.incarnation,
        as_rank=rank,
        identity=state.identity,
        attempts=event.attempts,
        sequence_digest=event.sequence_digest,
        can_adopt_in_place=event.can_adopt_in_place,
        reason=event.reason,
        seconds=event.seconds,
        classes=event.classes,
        answers=event.answers,
        has_first_buckets=event.has_first_buckets,
    )
    move = post(replace(state, main=Parked(rank)), ready, now)
    if isinstance(state.switch, Accepted):
        return join(move, start_cut_over(move.state, now))
    return replace_reason(move, "parked")


def _built(state: WorkerState, event: BoundaryReached, now: Instant) -> Transition:
    step = state.applied.step
    if event.step != step:
        text = f"main built at step {event.step}, generation {state.generation} starts at {step}"
        return stop(state, exits.PROTOCOL_FAILED, text)
    bound = replace(state, main=Bound(step))
    if isinstance(state.switch, Accepted) and state.switch.plan.is_rollback:
        return start_cut_over(bound, now)  # all that was built is loaded over
    if state.is_broken or state.is_frozen:
        return stay(replace(bound, is_build_void=True), "built on invented values: void")
    tracked = Tracked(
        incarnation=state.incarnation,
        rank=state.rank,
        identity=state.identity,
        names_digest=state.names_digest,
    )
    move = post(bound, tracked, now, UNANSWERED_SENDS)
    return join(move, arrive(move.state, now))


def arrive(state: WorkerState, now: Instant) -> Transition:
    """At a boundary: whatever waited for it happens, else the next step runs."""
    step = state.applied.step
    if isinstance(state.switch, Accepted):
        plan = state.switch.plan
        if plan.target == state.previous and not plan.is_rollback:
            return start_cut_over(gone_back(state), now)
        if plan.target != state.applied and not plan.is_rollback:
            return off_target(state)
        return start_cut_over(state, now)
    if state.is_frozen or state.is_broken:
        return stay(state, f"waits at the boundary of step {step}")
    result = flags.GateResult(vector=state.last_result) if state.last_result else None
    if result is not None and result.is_stop_requested and not state.follows("finish"):
        return stop(state, exits.STOPPED_BY_OPERATOR, "stops alone")
    if result is not None and result.is_stop_requested:
        return finish(state, is_stopped=True, now=now)
    number = result.switch_number if result is not None else 0
    if number > max(state.highest_aborted, state.generation):
        return meet_flag(state, number, now)
    return run_step(state, now)


def meet_flag(state: WorkerState, number: int, now: Instant) -> Transition:
    """W8: the gate named a planned switchover: stop here, say so, and cut over if it is known."""
    body = AtBoundary(incarnation=state.incarnation, number=number, version=state.applied)
    move = post(marked(state, "boundary_reached", now), body, now)
    switch = state.switch
    if not isinstance(switch, Offered) or switch.plan.number != number:
        return replace_reason(move, f"waits at the boundary for switchover {number}")
    if switch.is_targeted and switch.plan.target != state.applied:
        return off_target(state)
    plan = replace(switch.plan, target=state.applied)
    accepted = replace(move.state, switch=Accepted(plan))
    return join(move, start_cut_over(accepted, now))


def start_cut_over(state: WorkerState, now: Instant) -> Transition:
    """`main` is where the accepted plan wants it (or nowhere that matters): swap channels."""
    assert isinstance(state.switch, Accepted)
    plan = state.switch.plan
    # Said at once: another plan may overtake this one when its buckets have been started over.
    has_first_buckets = state.has_first_buckets or plan.renews_buckets
    moved = replace(state, switch=CuttingOver(plan), has_first_buckets=has_first_buckets)
    moved = marked(moved, "cut_over", now)
    return Transition(moved, (CutOver(plan=plan),), f"cuts over to generation {plan.number}")


def off_target(state: WorkerState) -> Transition:
    """A plan that names another boundary than the one this rank is at can't be carried out."""
    text = f"stands at step {state.applied.step}, which its plan does not name"
    return stop(state, exits.PROTOCOL_FAILED, text)


def replace_reason(move: Transition, reason: str) -> Transition:
    """The same move under another reason."""
    return Transition(move.state, move.commands, reason)


def oldest_needed(state: WorkerState) -> int:
    """Step below which personal state is needed no more: the own one, or what a plan may lead back
    to."""
    switch = state.switch
    step = (state.previous or state.applied).step
    is_rollback = switch is not None and switch.plan.is_rollback
    return min(step, switch.plan.target.step) if switch is not None and is_rollback else step


def drop_old_personal(state: WorkerState) -> WorkerState:
    """W7: personal state of versions below the own one is needed no more."""
    step = oldest_needed(state)
    kept = tuple(held for held in state.personal if held.version.step >= step)
    return state if len(kept) == len(state.personal) else replace(state, personal=kept)


# ------------------------------------------------------------------------- the gate


def take_snapshot(state: WorkerState, level: int) -> Transition:
    """The controller wants a snapshot: the next gate asks all ranks for it."""
    if not state.is_member:
        return stay(state, "has no rank")
    wanted = replace(state, snapshot_wanted=max(state.snapshot_wanted, level))
    return stay(wanted, f"a snapshot of level {level} rides on the next gate")


def flags_to_carry(state: WorkerState) -> tuple[int, bool]:
    """Switchover number and stop request that the next contribution carries."""
    is_open = state.flag > max(state.highest_aborted, state.generation)
    return (state.flag if is_open else 0, state.is_stop_requested)


def on_gate_requested(state: WorkerState, event: GateRequested, now: Instant) -> Transition:
    """W2: gradients are complete; contribute once W3 allows it."""
    match state.main:
        case Running(step=step, since=since) if event.step == step:
            ready = Ready(step, event.kind, event.flags, now)
            moved = replace(state, main=ready, step_time_ns=now - since)
            return try_contribute(moved, now)
        case RunningOut(step=step) if event.step == step:
            return Transition(state, (UndoStep(step=step),), "the attempt is void: undo")
        case Ready(step=step) | InGate(step=step) if event.step == step:
            return stay(state, "asked for this gate already")
        case Running() | RunningOut() | Ready() | InGate() | Tail():
            text = f"main asked for the gate of step {event.step} out of turn"
            return stop(state, exits.PROTOCOL_FAILED, text)
        case _:
            return stay(state, "this main is not waited for")


def try_contribute(state: WorkerState, now: Instant) -> Transition:
    """W3: contribute iff ready, not broken, not promised away, and all wards' state is held."""
    ready = state.main
    if not isinstance(ready, Ready) or state.is_broken or state.is_frozen:
        return stay(state, "nothing to contribute")
    if now < state.suspect_until:
        return stay(state, "was stopped: hears its peers first")
    if ready.kind == flags.STEP and not holds_wards(state, ready.step + 1):
        return stay(state, "ready; a ward's personal state is missing")
    number, is_stop_requested = flags_to_carry(state)
    vector = list(ready.flags)
    vector[flags.SWITCH_NUMBER] = number
    vector[flags.STOP_REQUESTED] = int(is_stop_requested)
    vector[flags.SNAPSHOT] = max(vector[flags.SNAPSHOT], state.snapshot_wanted)
    moved = replace(state, main=InGate(ready.step, ready.kind, now))
    command = ContributeGate(step=ready.step, kind=ready.kind, flags=tuple(vector))
    return Transition(moved, (command,), f"contributes to gate {ready.step}")


def on_personal(state: WorkerState, event: PersonalReceived, now: Instant) -> Transition:
    """A ward's personal state is held here; a final copy takes the place of the gate's."""
    new = event.held
    if new.version.step < oldest_needed(state) and state.is_member:
        return stay(state, "personal state of a version that is needed no more")
    for held in state.personal:
        if (held.owner_rank, held.version) != (new.owner_rank, new.version):
            continue
        # Whoever has become the holder of a rank's updates is sent a second copy behind them.
        is_news = new.replay_from is not None and held.replay_from is None
        if not is_news and (held.is_final or not new.is_final):
            return stay(state, "held already")
        new = replace(new, is_final=held.is_final or new.is_final)
        break
    kept = tuple(
        held
        for held in state.personal
        if (held.owner_rank, held.version) != (new.owner_rank, new.version)
    )
    return try_contribute(replace(state, personal=(*kept, new)), now)


def on_gate_completed(state: WorkerState, event: GateCompleted, now: Instant) -> Transition:
    """W4, W5: the gate has passed here: apply, unless a freeze or a break came first."""
    gate = state.main
    if event.generation != state.generation or not isinstance(gate, InGate):
        return stay(state, "no such gate is waited for")
    if event.step != gate.step or (state.is_frozen and state.follows("freeze_closes_gates")):
        return stay(state, "this gate is closed")
    if event.kind != gate.kind:
        text = f"ranks disagree whether step {gate.step} exists: loops of unequal length"
        return stop(state, exits.SCRIPT_FAILED, text)
    first = _first_gate(state, gate.step, now)
    passed = replace(first.state, last_result=event.vector)
    if gate.kind == flags.FINISH:
        if not state.follows("finish"):
            return stop(state, exits.COMPLETED, "leaves without COMPLETE")
        return join(first, finish(passed, is_stopped=False, now=now))
    level = flags.GateResult(vector=event.vector).snapshot
    wanted = passed.snapshot_wanted if level < passed.snapshot_wanted else 0
    moved = replace(passed, main=Tail(gate.step, now), snapshot_wanted=wanted)
    command = ApplyGate(step=gate.step, kind=gate.kind, vector=event.vector)
    applied = Transition(moved, (command,), f"gate {gate.step} passed")
    return join(first, applied) if first.commands else applied


def _first_gate(state: WorkerState, step: int, now: Instant) -> Transition:
    if state.is_first_gate_passed:
        return stay(state, "")
    moved = marked(replace(state, is_first_gate_passed=True), "first_gate", now)
    body = FirstGate(
        incarnation=state.incarnation,
        generation=state.generation,
        step=step,
        marks=moved.marks,
    )
    return post(replace(moved, marks=()), body, now, UNANSWERED_SENDS)


def finish(state: WorkerState, *, is_stopped: bool, now: Instant) -> Transition:
    """C6: nobody leaves before COMPLETE is journaled; until then state and process stay."""
    step = state.applied.step
    body = FinishPassed(
        incarnation=state.incarnation,
        generation=state.generation,
        step=step,
        is_stopped=is_stopped,
    )
    move = post(replace(state, main=Finished(step, is_stopped)), body, now)
    return replace_reason(move, "finished; waits for COMPLETE")


# ------------------------------------------------------------------------- main's failures


def on_main_failed(state: WorkerState, event: MainFailed, now: Instant) -> Transition:
    """`main` raised: while running out that costs this process, else the controller decides."""
    match state.main:
        case Ended() | Failed():
            return stay(state, "over already")
        case Rehearsing() | Parked():
            body = StandbyFailed(incarnation=state.incarnation, reason=event.error)
            failed = replace(state, main=Failed(), switch=None)
            return replace_reason(post(failed, body, now), "could not build main")
        case _ if event.was_running_out or isinstance(state.main, RunningOut):
            text = f"the interrupted attempt could not be ended: {event.error}"
            return stop(state, exits.INTERRUPTED, text)
        case _:
            failure = ScriptFailed(
                incarnation=state.incarnation,
                rank=event.rank,
                step=event.step,
                text=event.text,
                error=event.error,
                was_running_out=event.was_running_out,
                is_machine_caused=event.is_machine_caused,
            )
            failed = replace(state, main=Failed(), switch=None)
            return replace_reason(post(failed, failure, now), "the script raised")
