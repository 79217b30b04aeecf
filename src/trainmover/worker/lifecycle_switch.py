"""A worker's way into a switchover: standby, phase one, flag, plan.

Decides which plan is acted on (W13) and when it can be carried out. What follows the cut-over is
decided in `lifecycle_commit`; how channels and state move is the runtime's.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainmover.protocol import exits
from trainmover.protocol.messages import (
    BecomeStandby,
    PhaseOneFailed,
    PhaseOneReady,
    Plan,
    PlanIssued,
    Prepare,
    RaiseFlag,
    Report,
    StandbyFailed,
    StandbyReady,
    WorkerUp,
)
from trainmover.units import Instant
from trainmover.worker.events import (
    AbortGeneration,
    ApplyGate,
    EnterMain,
    PhaseOneBroke,
    PhaseOneDone,
    PreparePhaseOne,
    UndoStep,
)
from trainmover.worker.lifecycle_back import gone_back
from trainmover.worker.lifecycle_break import SWITCH_MESSAGES, is_parked_standby
from trainmover.worker.lifecycle_commit import settle_open
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
from trainmover.worker.lifecycle_step import (
    off_target,
    replace_reason,
    start_cut_over,
    stop,
)

# ------------------------------------------------------------------------- standby


def on_become_standby(state: WorkerState, event: BecomeStandby, now: Instant) -> Transition:
    """Build `main` as that rank in loop-back, unless it is being done or was done."""
    state = answered(state, WorkerUp)
    if state.is_member or isinstance(state.main, Ended | Leaving) or state.switch is not None:
        return stay(state, "no time to become a standby")
    match state.main:
        case Rehearsing(as_rank=rank) | Parked(as_rank=rank) if rank == event.as_rank:
            return stay(state, "a standby for this rank already")
        case _:
            moved = replace(state, main=Rehearsing(event.as_rank, now))
            cleared = answered(moved, StandbyReady, StandbyFailed)
            return Transition(cleared, (_rehearse(event),), "builds")


def _rehearse(event: BecomeStandby) -> EnterMain:
    first = event.rehearsals[0].as_rank if event.rehearsals else event.as_rank
    return EnterMain(
        rank=first,
        world_size=event.world_size,
        is_loopback=True,
        rehearsals=event.rehearsals,
    )


def _loop_back(rank: int, plan: Plan) -> EnterMain:
    return EnterMain(
        rank=rank,
        world_size=plan.membership.world_size,
        is_loopback=True,
        attempts=plan.attempts,
        version=plan.target.step,
    )


# ------------------------------------------------------------------------- planned: phase one


def on_prepare(state: WorkerState, event: Prepare, now: Instant) -> Transition:
    """Phase one of a planned switchover, in the background."""
    plan = event.plan
    switch = state.switch
    state = answered(state, WorkerUp)
    if isinstance(switch, Offered) and switch.plan.number == plan.number:
        return _repeat_ready(state, switch, now)
    if not _may_take_part(state, plan) or isinstance(switch, Accepted | CuttingOver | Prepared):
        return stay(state, "not prepared for: frozen, settled, busy or not concerned")
    if plan.number <= max(state.promise, state.generation, state.highest_aborted):
        return stay(state, "an old plan")
    commands: tuple[AbortGeneration | PreparePhaseOne, ...] = (PreparePhaseOne(plan=plan),)
    if switch is not None:
        settled = AbortGeneration(number=switch.plan.number, back_to=state.generation)
        commands = (settled, *commands)
        state = answered(state, *SWITCH_MESSAGES)
    offered = replace(answered(state, StandbyReady), switch=Offered(plan))
    return Transition(offered, commands, f"prepares for {plan.number}")


def _repeat_ready(state: WorkerState, switch: Offered, now: Instant) -> Transition:
    if not switch.is_ready:
        return stay(state, "still preparing")
    body = PhaseOneReady(incarnation=state.incarnation, number=switch.plan.number)
    return replace_reason(post(state, body, now), "ready, as said before")


def _may_take_part(state: WorkerState, plan: Plan) -> bool:
    if state.is_frozen or isinstance(state.main, Ended | Leaving | Failed | Finished):
        return False
    if state.incarnation in plan.joiners:
        return is_parked_standby(state)
    return state.is_member and plan.base_generation == state.generation


def on_phase_one_done(state: WorkerState, event: PhaseOneDone, now: Instant) -> Transition:
    """Everything the plan adds is open here."""
    switch = state.switch
    if not isinstance(switch, Offered) or switch.plan.number != event.number:
        return stay(state, "no such phase one is open")
    body = PhaseOneReady(incarnation=state.incarnation, number=event.number)
    move = post(replace(state, switch=replace(switch, is_ready=True)), body, now)
    return replace_reason(move, "phase one done")


def on_phase_one_broke(state: WorkerState, event: PhaseOneBroke, now: Instant) -> Transition:
    """Phase one can't be completed: the controller aborts."""
    switch = state.switch
    if not isinstance(switch, Offered) or switch.plan.number != event.number:
        return stay(state, "no such phase one is open")
    body = PhaseOneFailed(incarnation=state.incarnation, number=event.number, edge=event.edge)
    return replace_reason(post(state, body, now), "phase one failed")


def on_raise_flag(state: WorkerState, event: RaiseFlag) -> Transition:
    """Carry the number in the next gate."""
    state = answered(state, PhaseOneReady)
    if event.number <= max(state.highest_aborted, state.generation, state.flag):
        return stay(state, "an old flag")
    if not state.is_member or state.is_frozen:
        return stay(state, "raises no flag")
    return stay(replace(state, flag=event.number), f"flag {event.number} rides on the next gate")


# ------------------------------------------------------------------------- plans


def on_plan(state: WorkerState, event: PlanIssued, now: Instant) -> Transition:
    """W13: act on the one plan that may be acted on."""
    plan = event.plan
    state = answered(state, WorkerUp)
    if state.switch is not None and state.switch.plan.number == plan.number:
        if isinstance(state.switch, Offered):
            return _target_fixed(state, state.switch, plan, now)
        return stay(state, "acting on this plan already")
    if plan.number <= max(state.generation, state.highest_aborted):
        return stay(state, "an old plan")
    if isinstance(state.main, Ended | Leaving | Failed):
        return stay(state, "takes part in nothing any more")
    if plan.kind == "planned":
        return _planned(state, plan, now)
    is_exact = plan.kind == "unplanned"
    is_promised = plan.number == state.promise if is_exact else plan.number >= state.promise
    if state.follows("promise") and not is_promised:
        return stay(state, "W13: not the plan that was promised")
    if plan.membership.rank_of(state.incarnation) is None:
        return stay(state, "not a member of this plan")
    state = replace(state, promise=plan.number, reported=max(state.reported, plan.number))
    settled = settle_open(state, plan)
    settled = replace(
        settled,
        state=marked(answered(settled.state, Report, StandbyReady), "plan_received", now),
    )
    return join(settled, _take_up(settled.state, plan, now))


def _target_fixed(state: WorkerState, switch: Offered, plan: Plan, now: Instant) -> Transition:
    if state.incarnation in plan.joiners:
        accepted = replace(answered(state, PhaseOneReady), switch=Accepted(plan))
        return start_cut_over(accepted, now)
    targeted = replace(state, switch=Offered(plan, switch.is_ready, True))
    return _cut_over_if_there(targeted, plan, now)


def _planned(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    if not _may_take_part(state, plan) or plan.number <= state.promise:
        return stay(state, "not concerned by this planned switchover")
    if state.incarnation in plan.joiners:
        accepted = replace(answered(state, StandbyReady), switch=Accepted(plan))
        return start_cut_over(accepted, now)
    return _cut_over_if_there(replace(state, switch=Offered(plan, False, True)), plan, now)


def _cut_over_if_there(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    """A member that waits at the flagged boundary goes on; any other gets there by itself."""
    waits = isinstance(state.main, Bound) and not state.is_broken
    if not waits:
        return stay(state, f"the target of {plan.number} is step {plan.target.step}")
    if plan.target != state.applied:
        return off_target(state)
    return start_cut_over(replace(state, switch=Accepted(plan)), now)


def _take_up(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    accepted = replace(state, switch=Accepted(plan))
    if plan.is_fresh_start:
        return start_cut_over(_left_main(accepted, plan) if state.is_member else accepted, now)
    if state.incarnation in plan.joiners or not state.is_member:
        return _join(accepted, plan, now)
    if plan.is_rollback:
        return _roll_back(accepted, plan, now)
    if state.is_half_rolled_back:
        text = f"plan {plan.number} counts on a state that is {state.broken_state}"
        return stop(state, exits.PROTOCOL_FAILED, text)
    if plan.target == state.previous:
        return _go_back(accepted, plan, now)
    step = plan.target.step
    match state.main:
        case Bound(step=at) if at == step and state.applied == plan.target:
            return start_cut_over(accepted, now)
        case RunningOut(step=at) if at == step and state.applied == plan.target:
            # Channels open meanwhile; the joiner need not wait for our backward to end.
            opening = (PreparePhaseOne(plan=plan),)
            return Transition(accepted, opening, "cuts over once the attempt has run out")
        case HeldInGate(step=at) | Finished(step=at) if at == step and state.applied == plan.target:
            if isinstance(state.main, Finished) and state.main.is_stopped:
                return start_cut_over(replace(accepted, main=Bound(at)), now)
            undone = replace(accepted, main=RunningOut(at, now))
            return Transition(undone, (UndoStep(step=at),), "no rank passed: undoes")
        case HeldInGate(step=at, kind=kind) if at + 1 == step:
            if not plan.result:
                text = f"the plan has no result of gate {at}, which this rank is held at"
                return stop(state, exits.PROTOCOL_FAILED, text)
            applied = replace(accepted, main=Tail(at, now), last_result=plan.result)
            command = ApplyGate(step=at, kind=kind, vector=plan.result)
            return Transition(applied, (command,), "some rank passed: applies")
        case _:
            return off_target(state)


def _go_back(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    """Another rank's tail was cut short: this one, which has its own behind it, repeats it."""
    match state.main:
        case Bound() | Finished(is_stopped=True):
            return start_cut_over(gone_back(state), now)
        case RunningOut():
            opening = (PreparePhaseOne(plan=plan),)
            return Transition(state, opening, "goes back once the attempt has run out")
        case HeldInGate(step=at) | Finished(step=at):
            undone = replace(state, main=RunningOut(at, now))
            return Transition(undone, (UndoStep(step=at),), "undoes, then goes back")
        case _:
            return off_target(state)


def _left_main(state: WorkerState, plan: Plan) -> WorkerState:
    """`main` is entered anew; what it had is gone, which matters if steps are left behind by it."""
    left = replace(state, main=NotEntered(), is_build_void=True)
    is_in_gate = isinstance(state.main, HeldInGate | InGate | Tail | Finished)
    if state.applied.step <= plan.target.step and not is_in_gate:
        return left
    text = state.broken_state or "left main for a start that was not committed"
    return replace(left, broken_state=text, is_half_rolled_back=True)


def _roll_back(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    """Every member loads its snapshot, wherever it stands: at a boundary, nothing half done.

    From here on its own state is good for nothing but another roll-back: a held rank that has
    undone can't apply any more.
    """
    text = state.broken_state or f"half rolled back to step {plan.target.step}"
    state = replace(state, broken_state=text, is_half_rolled_back=True)
    match state.main:
        case Bound():
            return start_cut_over(state, now)
        case Finished(step=at, is_stopped=True):
            return start_cut_over(replace(state, main=Bound(at)), now)
        case Finished(step=at) | HeldInGate(step=at) | InGate(step=at) | Ready(step=at):
            undone = replace(state, main=RunningOut(at, now))
            return Transition(undone, (UndoStep(step=at),), "undoes, then rolls back")
        case Running(step=at):
            return stay(replace(state, main=RunningOut(at, now)), "runs out, then rolls back")
        case RunningOut() | Tail() | Building():
            return stay(state, "rolls back at the next boundary")
        case NotEntered() | Parked() | Rehearsing():
            return _join(state, plan, now)
        case _:
            return off_target(state)


def _join(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    match state.main:
        case Parked():
            return start_cut_over(state, now)
        case Rehearsing():
            return stay(state, "joins once main is built")
        case NotEntered():
            rank = plan.membership.rank_of(state.incarnation)
            rehearsing = replace(state, main=Rehearsing(rank or 0, now))
            command = _loop_back(rank or 0, plan)
            return Transition(rehearsing, (command,), "builds main, then joins")
        case _:
            return off_target(state)
