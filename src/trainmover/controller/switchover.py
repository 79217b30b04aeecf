"""Planned switchovers: machines leave at a step boundary and standbys take their ranks.

Decides whether a request can be accepted, who joins, and the order prepare, flag, boundary, plan.
A fault inside aborts it first (protocol 20); the old generation is usable until the commit.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import ending, fitting, incidents, lookup, plans, shelf
from trainmover.controller.move import Move
from trainmover.controller.state import (
    Flagged,
    Forming,
    Preparing,
    Switching,
    Training,
    Wish,
    Worker,
)
from trainmover.protocol import exits
from trainmover.protocol.messages import (
    AtBoundary,
    Done,
    OperatorReply,
    Plan,
    Prepare,
    RaiseFlag,
    Source,
    SwitchoverRequest,
    TakeSnapshot,
    Version,
)
from trainmover.topology import Member, Membership

UNKNOWN = Version(step=-1)
"""Target of a planned switchover before its boundary is known."""

# --------------------------------------------------------------------------- requests


def on_request(move: Move, request: SwitchoverRequest) -> None:
    """Accept or refuse, with the reason an operator can act on."""
    refusal = _refusal(move, request)
    if refusal:
        reply = OperatorReply(
            request=request.request, is_accepted=False, is_final=True, text=refusal
        )
        move.reply(reply)
        move.because(f"refused: {refusal}")
        return
    wish = Wish(request=request.request, machines=request.machines, to=request.to)
    move.state = replace(move.state, wish=wish)
    text = f"switchover of {', '.join(request.machines)} accepted"
    move.reply(OperatorReply(request=request.request, is_accepted=True, is_final=False, text=text))
    advance(move)


def _refusal(move: Move, request: SwitchoverRequest) -> str:
    state = move.state
    incident = state.incident
    if state.wish is not None and state.wish.request == request.request:
        return ""  # the same request, sent again
    if not isinstance(state.phase, Training):
        doing = type(state.phase).__name__.lower()
        if incident is not None and incident.is_planned:
            return f"a switchover is open already ({doing}); wait for it"
        if isinstance(state.phase, Forming) or state.generation == 0:
            return "the job is still forming; wait until it trains"
        return f"the job is {doing}; wait until it trains"
    if state.wish is not None:
        return "a switchover is open already; wait for it"
    if state.is_stop_wanted:
        return "the job is about to stop"
    return _refusal_of_machines(move, request)


def _refusal_of_machines(move: Move, request: SwitchoverRequest) -> str:
    membership = move.state.membership
    active = set(membership.machines()) if membership is not None else set()
    if not request.machines:
        return "name at least one machine"
    if len(set(request.machines)) < len(request.machines):
        return "a machine is named twice"
    for name in request.machines:
        if name not in move.state.machines and name not in active:
            known = ", ".join(sorted(active, key=lookup.natural_order))
            return f"no machine is called {name}; machines with ranks: {known}"
        if name in request.to:
            return f"{name} can't be switched over to itself"
        if name not in active:
            return f"{name} has no rank, it is a standby"
    if request.to and len(request.to) != len(request.machines):
        return f"{len(request.machines)} machines leave, {len(request.to)} standbys are named"
    for name in request.to:
        if name in active:
            return f"{name} plays ranks itself, it is no standby"
        if name not in move.state.machines:
            return f"no machine is called {name}"
    return _joiners(move, request.machines, request.to)[1]


# --------------------------------------------------------------------------- joiners


def _joiners(
    move: Move, machines: tuple[str, ...], to: tuple[str, ...]
) -> tuple[dict[int, Worker], str]:
    """A standby worker per leaving rank, or why there is none."""
    chosen: dict[int, Worker] = {}
    taken: list[str] = []
    for index, machine in enumerate(machines):
        ranks = lookup.ranks_on(move.state.membership, machine)
        wanted = to[index] if index < len(to) else ""
        standby = _standby_machine(move, ranks, wanted, taken)
        if standby is None:
            return {}, _why_not_ready(move, machine, wanted)
        taken.append(standby)
        by_place = {w.local_rank: w for w in lookup.workers_on(move.state, standby)}
        chosen |= {rank: by_place[lookup.local_rank_of(move.state, rank)] for rank in ranks}
    return chosen, ""


def _standby_machine(
    move: Move, ranks: tuple[int, ...], wanted: str, taken: list[str]
) -> str | None:
    """A machine with a ready worker for each of `ranks`; the same role class is preferred."""
    fitting = []
    for machine in lookup.usable_machines(move.state):
        if machine.name in taken or (wanted and machine.name != wanted):
            continue
        ready = {
            worker.local_rank: worker
            for worker in lookup.workers_on(move.state, machine.name)
            if lookup.is_ready(worker)
        }
        needed = [lookup.local_rank_of(move.state, rank) for rank in ranks]
        if all(local_rank in ready for local_rank in needed):
            fitting.append((machine.name, ready))
    best, best_score = None, -1
    for name, ready in fitting:
        score = sum(_is_alike(move, rank, ready) for rank in ranks)
        if score > best_score:
            best, best_score = name, score
    return best


def _is_alike(move: Move, rank: int, ready: dict[int, Worker]) -> bool:
    readiness = ready[lookup.local_rank_of(move.state, rank)].readiness
    identity = lookup.identity_of(move.state, rank)
    return readiness is not None and readiness.identity == identity


def _why_not_ready(move: Move, leaving: str, wanted: str) -> str:
    active = move.state.membership.machines() if move.state.membership is not None else ()
    reasons = []
    for name in sorted(move.state.machines, key=lookup.natural_order):
        if name in active or (wanted and name != wanted):
            continue
        workers = lookup.workers_on(move.state, name)
        said = [worker.reason for worker in workers if worker.reason]
        machine = move.state.machines[name]
        why = machine.reason or (said[0] if said else "not ready yet")
        if not machine.is_linked:
            why = "its agent is not connected"
        reasons.append(f"{name}: {why}")
    listed = "; ".join(reasons) if reasons else "there is no standby"
    return f"no standby is ready to take over from {leaving} ({listed})"


# --------------------------------------------------------------------------- course


def advance(move: Move) -> None:
    """Begin a wished switchover, or one for an agent that leaves, when training is settled."""
    phase, wish = move.state.phase, move.state.wish
    if not isinstance(phase, Training) or move.state.failure is not None:
        return
    if not is_settled(phase) or move.state.is_stop_wanted:
        return
    if wish is not None:
        move.state = replace(move.state, wish=None)
        chosen, why = _joiners(move, wish.machines, wish.to)
        if why:
            reply = OperatorReply(request=wish.request, is_accepted=False, is_final=True, text=why)
            move.reply(reply)
            return
        _prepare(move, wish, chosen)
        return
    _advance_leaving(move)


def is_settled(phase: Training) -> bool:
    """Whether the committed generation is known to train."""
    return phase.has_passed_gate and not phase.untracked and not phase.unacknowledged


def _advance_leaving(move: Move) -> None:
    membership = move.state.membership
    active = membership.machines() if membership is not None else ()
    for name in active:
        machine = move.state.machines.get(name)
        if machine is None or not machine.is_leaving:
            continue
        if not fitting.does_switchover_fit(move.state, machine.leave_by, move.now):
            continue  # a standby takes its ranks once it is gone
        chosen, why = _joiners(move, (name,), ())
        rank = lookup.ranks_on(membership, name)[0]
        step = lookup.known_step(move.state)
        if not why and move.count_try("leave", rank, step) <= move.state.config.max_tries:
            _prepare(move, Wish(request="", machines=(name,), to=()), chosen)
            return


def obstacle(move: Move, machine: str) -> str:
    """Why the ranks of `machine` can't move to a standby now; empty: they can."""
    return _joiners(move, (machine,), ())[1]


def _prepare(move: Move, wish: Wish, chosen: dict[int, Worker]) -> None:
    state = move.state
    number = move.next_number()
    leaving = tuple(lookup.members(state)[rank].incarnation for rank in sorted(chosen))
    reason = f"planned switchover of {', '.join(wish.machines)}"
    plan = Plan(
        number=number,
        kind="planned",
        base_generation=state.generation,
        target=UNKNOWN,
        membership=Membership(generation=number, members=_new_members(move, chosen)),
        leavers=leaving,
        leaver_members=tuple(lookup.members(state)[rank] for rank in sorted(chosen)),
        joiners=tuple(chosen[rank].incarnation for rank in sorted(chosen)),
        sources=tuple(
            Source(rank=rank, bulk_from=name, own_from=name, shared_from=name, kind="leaver")
            for rank, name in zip(sorted(chosen), leaving, strict=True)
        ),
        reason=reason,
    )
    incidents.begin(move, reason=reason, is_planned=True, request=wish.request)
    incidents.note(move, "joiner_chosen")
    move.reached("joiner_chosen", number)
    plans.record(move, plan)
    move.reached("prepare", number)
    waiting = (*lookup.member_names(state), *plan.joiners)
    deadline = move.in_(state.config.prepare_timeout_s)
    move.enter(Preparing(plan=plan, waiting=waiting, deadline=deadline))
    move.tell_in_halves(waiting, Prepare(term=state.term, plan=plan), number)
    move.because(f"prepare {number}: {reason}")


def _new_members(move: Move, chosen: dict[int, Worker]) -> tuple[Member, ...]:
    members = []
    for member in lookup.members(move.state):
        worker = chosen.get(member.rank)
        if worker is None:
            members.append(member)
            continue
        joiner = Member(
            rank=member.rank,
            incarnation=worker.incarnation,
            machine=worker.machine,
            host=worker.host,
            port=worker.port,
        )
        members.append(joiner)
    return tuple(members)


def on_ready(move: Move, phase: Preparing, name: str) -> None:
    """Phase one is done on one participant; with the last the flag goes up."""
    waiting = tuple(each for each in phase.waiting if each != name)
    move.enter(replace(phase, waiting=waiting))
    if waiting:
        return
    incidents.note(move, "prepared_phase_one")
    deadline = move.in_(move.state.config.boundary_timeout_s)
    move.enter(Flagged(plan=phase.plan, deadline=deadline))
    for member in lookup.member_names(move.state):
        if _leaves_alone(move, phase.plan):
            move.tell(member, TakeSnapshot(term=move.state.term, level=shelf.SNAPSHOT))
        move.tell(member, RaiseFlag(term=move.state.term, number=phase.plan.number))
    incidents.note(move, "flag_raised")
    move.reached("flag_set", phase.plan.number)


def _leaves_alone(move: Move, plan: Plan) -> bool:
    """Whether a leaver's bulk state is nobody else's.

    Should its joiner die right behind the commit, the state would be gone with the leaver
    (protocol 21): a snapshot at the very boundary of the switchover loses no step.
    """
    kept = move.state.kept
    if not kept.keeping.snapshot.is_on or not kept.stores:
        return False
    leaving = [member.rank for member in plan.leaver_members]
    staying = {
        lookup.identity_of(move.state, member.rank)
        for member in lookup.members(move.state)
        if member.rank not in leaving
    }
    return any(lookup.identity_of(move.state, rank) not in staying for rank in leaving)


def on_boundary(move: Move, body: AtBoundary | Done) -> None:
    """A rank has stopped behind the flagged gate; the first one names the boundary."""
    phase = move.state.phase
    match phase:
        case Flagged(plan=plan) if plan.number == body.number:
            incidents.note(move, "boundary")
            plans.fix_target(move, plan, body.version)
        case Switching(plan=plan) if plan.number == body.number and plan.kind == "planned":
            if body.version != plan.target:
                text = (
                    f"{body.incarnation} stopped for switchover {plan.number} at step "
                    f"{body.version.step}, another at step {plan.target.step}"
                )
                ending.stop(move, exits.PROTOCOL_FAILED, text)
        case _:
            pass


def give_up(move: Move, reason: str) -> None:
    """Abort the open planned switchover: the old generation goes on."""
    phase = move.state.phase
    if not isinstance(phase, Preparing | Flagged | Switching) or phase.plan.kind != "planned":
        return
    plan, incident = phase.plan, move.state.incident
    plans.abort(move, plan, reason)
    if incident is not None and incident.request:
        reply = OperatorReply(
            request=incident.request,
            is_accepted=False,
            is_final=True,
            text=f"aborted, the old membership goes on: {reason}",
            number=plan.number,
        )
        move.reply(reply)
    incidents.give_up(move, plan.number, f"aborted: {reason}")
    move.enter(Training(has_passed_gate=True, committed_at=move.now))
