"""A worker's way out of a switchover: prepared, then committed, aborted or released.

Decides that PREPARED ends only by a commit, an abort or a later plan (W15), and what each means
for a stayer, a joiner and a leaver.
"""

from __future__ import annotations

from typing import Literal, cast

from msgspec.structs import replace

from trainmover.protocol import exits, flags
from trainmover.protocol.messages import (
    Abort,
    Broken,
    Commit,
    CommitAcknowledged,
    Done,
    Lost,
    Plan,
    Release,
    Report,
    StandbyReady,
)
from trainmover.topology.membership import wards_of
from trainmover.units import Instant
from trainmover.worker.events import (
    AbortGeneration,
    CommitGeneration,
    CutOverBroke,
    CutOverDone,
    EnterMain,
    LeaveMain,
    NextGenerationFrame,
)
from trainmover.worker.lifecycle_break import SWITCH_MESSAGES, break_generation
from trainmover.worker.lifecycle_state import (
    Bound,
    Building,
    CuttingOver,
    Ended,
    Leaving,
    NotEntered,
    Parked,
    Prepared,
    Transition,
    WorkerState,
    answered,
    join,
    marked,
    post,
    stay,
)
from trainmover.worker.lifecycle_step import (
    UNANSWERED_SENDS,
    replace_reason,
    run_step,
    stop,
)

Adopted = Literal["", "in_place", "reentered", "as_built"]

# ------------------------------------------------------------------------- cut-over


def on_cut_over_done(state: WorkerState, event: CutOverDone, now: Instant) -> Transition:
    """W14 is fulfilled here: PREPARED."""
    switch = state.switch
    if not isinstance(switch, CuttingOver) or switch.plan.number != event.number:
        return stay(state, "no such cut-over is open")
    if event.version != switch.plan.target:
        text = f"cut over at {event.version}, the plan says {switch.plan.target}"
        return stop(state, exits.PROTOCOL_FAILED, text)
    moved = marked(state, "prepared", now)
    body = Done(
        incarnation=state.incarnation,
        number=event.number,
        version=event.version,
        identity=event.identity,
        bulk_digest=event.bulk_digest,
        shared_digest=event.shared_digest,
        channels=event.channels,
        bytes_received=event.bytes_received,
        adopted=cast(Adopted, event.adopted),
        marks=(*moved.marks, *event.marks),
    )
    prepared = replace(
        answered(moved, *SWITCH_MESSAGES),
        switch=Prepared(switch.plan, switch.broken),
        identity=event.identity or state.identity,
    )
    move = replace_reason(post(prepared, body, now), f"prepared for {event.number}")
    if state.follows("wait_for_commit"):
        return move
    return join(move, on_commit(move.state, Commit(term=state.term, number=event.number), now))


def on_cut_over_broke(state: WorkerState, event: CutOverBroke, now: Instant) -> Transition:
    """The cut-over is stuck on one peer: the controller aborts."""
    switch = state.switch
    if not isinstance(switch, CuttingOver) or switch.plan.number != event.number:
        return stay(state, "no such cut-over is open")
    body = Lost(incarnation=state.incarnation, number=event.number, edge=event.edge)
    return replace_reason(post(state, body, now), "the cut-over is stuck")


# ------------------------------------------------------------------------- commit and abort


def on_commit(state: WorkerState, event: Commit, now: Instant) -> Transition:
    """W15: run in the committed generation."""
    acknowledged = CommitAcknowledged(incarnation=state.incarnation, number=event.number)
    switch = state.switch
    if not isinstance(switch, Prepared) or switch.plan.number != event.number:
        if state.generation == event.number or isinstance(state.main, Leaving):
            return replace_reason(post(state, acknowledged, now, 0), "committed already")
        return stay(state, "not prepared for this commit")
    move = commit_open(state)
    if isinstance(move.state.main, Leaving):
        return join(move, post(move.state, acknowledged, now, 0))
    told = post(marked(move.state, "committed", now), acknowledged, now, UNANSWERED_SENDS)
    move = join(move, told)
    if state.promise > event.number:
        return replace_reason(move, f"{event.number} committed; frozen for {state.promise}")
    move = join(move, _enter(move.state, switch.plan, now))
    if not switch.broken and not switch.is_broken_ahead:
        return move
    return join(move, break_generation(move.state, switch.broken, now))


def settle_open(state: WorkerState, plan: Plan) -> Transition:
    """A plan says by its base which open number before it was committed, and which was not."""
    switch = state.switch
    if switch is None:
        return stay(state, "")
    number = switch.plan.number
    if plan.base_generation == number:
        return commit_open(state)
    dropped = replace(answered(state, *SWITCH_MESSAGES), switch=None)
    return Transition(
        dropped, (AbortGeneration(number=number, back_to=0),), f"{number} was not committed"
    )


def commit_open(state: WorkerState) -> Transition:
    """Become a member of (or leave with) the prepared generation; `main` is not moved."""
    assert isinstance(state.switch, Prepared)
    plan = state.switch.plan
    command = CommitGeneration(number=plan.number, target_step=plan.target.step)
    rank = plan.membership.rank_of(state.incarnation)
    state = answered(state, *SWITCH_MESSAGES, Broken, StandbyReady)
    if state.promise <= plan.number:
        state = answered(state, Report)
    if rank is None:
        gone = replace(state, switch=None, main=Leaving(), is_broken=False)
        return Transition(gone, (command,), f"leaves with the commit of {plan.number}")
    target = plan.target.step
    kept = tuple(held for held in state.personal if held.version.step <= target)
    is_new = plan.is_fresh_start or state.incarnation in plan.joiners
    member = replace(
        state,
        switch=None,
        generation=plan.number,
        promise=max(state.promise, plan.number),
        membership=plan.membership,
        rank=rank,
        wards=wards_of(rank, plan.membership),
        applied=plan.target,
        previous=None,
        last_result=plan.result if is_new or plan.is_rollback else state.last_result,
        is_broken=False,
        edges=(),
        broken_state="",
        is_half_rolled_back=False,
        is_build_void=False,
        is_first_gate_passed=False,
        personal=() if plan.is_fresh_start else kept,
        main=NotEntered() if plan.is_fresh_start else Bound(target),
        attempts=0 if plan.is_fresh_start else state.attempts,
    )
    return Transition(member, (command,), f"generation {plan.number} is committed")


def _enter(state: WorkerState, plan: Plan, now: Instant) -> Transition:
    if not plan.is_fresh_start:
        return run_step(state, now)
    command = EnterMain(
        rank=state.rank, world_size=plan.membership.world_size, is_loopback=False, attempts=-1
    )
    return Transition(replace(state, main=Building(now)), (command,), "enters main")


def on_next_generation_frame(
    state: WorkerState, event: NextGenerationFrame, now: Instant
) -> Transition:
    """C8: commit is contagious: a peer runs in the generation this worker is prepared for."""
    switch = state.switch
    if not isinstance(switch, Prepared) or switch.plan.number != event.generation:
        return stay(state, "not prepared for this generation")
    if state.promise > event.generation:
        return stay(state, "frozen for a later number")
    return on_commit(state, Commit(term=state.term, number=event.generation), now)


def on_abort(state: WorkerState, event: Abort, now: Instant) -> Transition:
    """Forget that number; a planned one goes back to training in the old generation."""
    if event.number <= state.generation:
        return stay(state, "an old abort")
    state = replace(state, highest_aborted=max(state.highest_aborted, event.number))
    if state.flag <= state.highest_aborted:
        state = replace(state, flag=0)
    if state.promise == event.number:
        state = answered(state, Report)
    switch = state.switch
    if switch is None or switch.plan.number != event.number:
        return _resume(answered(state, *SWITCH_MESSAGES), now)
    is_back = switch.plan.kind == "planned" and not state.is_frozen
    command = AbortGeneration(number=event.number, back_to=state.generation if is_back else 0)
    moved = replace(answered(state, *SWITCH_MESSAGES), switch=None)
    move = Transition(moved, (command,), f"{event.number} is aborted")
    if not state.is_member:
        return join(move, _stand_by_again(moved, now))
    if isinstance(switch, Prepared) and (switch.broken or switch.is_poisoned):
        members = {
            member.incarnation for member in (state.membership.members if state.membership else ())
        }
        edges = tuple(edge for edge in switch.broken if edge.peer in members)
        if edges or switch.is_poisoned:
            return join(move, break_generation(moved, edges, now))
    return join(move, _resume(moved, now))


def _resume(state: WorkerState, now: Instant) -> Transition:
    """Go on from a boundary that only the aborted number kept this rank at."""
    if not isinstance(state.main, Bound) or state.is_broken or state.is_frozen or state.switch:
        return stay(state, "")
    if not state.is_member or _flagged(state) > state.highest_aborted:
        return stay(state, "")
    return run_step(state, now)


def _flagged(state: WorkerState) -> int:
    return flags.GateResult(vector=state.last_result).switch_number if state.last_result else 0


def _stand_by_again(state: WorkerState, now: Instant) -> Transition:
    if not isinstance(state.main, Parked):
        return stay(state, "")
    body = StandbyReady(
        incarnation=state.incarnation,
        as_rank=state.main.as_rank,
        identity=state.identity,
        attempts=state.attempts,
        sequence_digest=state.sequence_digest,
        can_adopt_in_place=state.can_adopt_in_place,
        has_first_buckets=state.has_first_buckets,
    )
    return replace_reason(post(state, body, now), "a standby again")


def on_release(state: WorkerState, event: Release, now: Instant) -> Transition:
    """The leaver's state is needed no more."""
    del now
    switch = state.switch
    is_prepared = isinstance(switch, Prepared) and switch.plan.number == event.number
    is_leaver = is_prepared and state.incarnation in (switch.plan.leavers if switch else ())
    if not isinstance(state.main, Leaving) and not is_leaver:
        return stay(state, "leaves nothing")
    ended = replace(state, main=Ended(), switch=None, outbox=())
    return Transition(ended, (LeaveMain(reason=f"replaced in {event.number}"),), "released")
