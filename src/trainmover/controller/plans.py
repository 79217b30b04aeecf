"""A plan's life: journaled and issued, prepared by everyone, then committed or aborted.

Decides when a plan commits (C5: every member, and a planned one's leavers, at the same version with
equal digests) and what a commit changes. Does not decide what a plan says, nor what follows an
abort. Always journal first, then send (protocol 13); a number has one plan and one end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from trainmover.controller import incidents, lookup, pool, shelf
from trainmover.controller.move import Move
from trainmover.controller.state import Switching, Training
from trainmover.protocol.journal import AbortRecorded, CommitRecorded, PlanRecorded, TargetFixed
from trainmover.protocol.messages import (
    Abort,
    Commit,
    Done,
    Fence,
    Freeze,
    OperatorReply,
    Plan,
    PlanIssued,
    Version,
)


def record(move: Move, plan: Plan) -> None:
    """Journal a plan; nothing is sent."""
    move.append(PlanRecorded(plan=plan))


def issue(move: Move, plan: Plan) -> None:
    """Journal a plan that has its target and send it."""
    record(move, plan)
    _start(move, plan)


def fix_target(move: Move, plan: Plan, target: Version) -> None:
    """A planned switchover has its boundary: journal it and send the whole plan."""
    plan = with_target(plan, target)
    move.append(TargetFixed(number=plan.number, target=target))
    _start(move, plan)


def with_target(plan: Plan, target: Version) -> Plan:
    """The same plan with its target known."""
    return msgspec.structs.replace(plan, target=target)


def _start(move: Move, plan: Plan) -> None:
    deadline = move.in_(move.state.config.cut_over_timeout_s)
    move.enter(Switching(plan=plan, deadline=deadline))
    if plan.kind == "unplanned":
        freeze_joiners(move, plan)
    body = PlanIssued(term=move.state.term, plan=plan)
    move.tell_in_halves(lookup.participants(plan), body, plan.number)
    move.because(f"plan {plan.number} ({plan.kind}) for step {plan.target.step}")


def freeze_joiners(move: Move, plan: Plan) -> None:
    """A joiner born after the freeze has to promise the number before it may act on the plan."""
    for name in plan.joiners:
        move.tell(name, Freeze(term=move.state.term, number=plan.number))


# --------------------------------------------------------------------------- prepared


def on_done(move: Move, phase: Switching, body: Done) -> str:
    """One participant is prepared; commits with the last. Returns what contradicts the plan."""
    plan = phase.plan
    if body.incarnation not in lookup.participants(plan):
        return ""
    if body.version != plan.target:
        return (
            f"{body.incarnation} is prepared at step {body.version.step} (lineage "
            f"{body.version.lineage}), plan {plan.number} says step {plan.target.step} "
            f"(lineage {plan.target.lineage})"
        )
    dones = {**phase.dones, body.incarnation: body}
    move.enter(replace(phase, dones=dones))
    if any(name not in dones for name in lookup.participants(plan)):
        return ""
    unequal = digest_conflict(plan, dones)
    if not unequal:
        incidents.note(move, "prepared", body.incarnation)
        move.reached("all_prepared", plan.number)
        commit(move, plan, dones)
    return unequal


def digest_conflict(plan: Plan, dones: Mapping[str, Done]) -> str:
    """Names participants whose state differs though it must be equal; 0 is 'not computed'."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for name in lookup.participants(plan):
        done = dones[name]
        if done.identity and done.bulk_digest:
            groups.setdefault(f"state {done.identity}", []).append((name, done.bulk_digest))
        if done.shared_digest:
            groups.setdefault("shared leaves", []).append((name, done.shared_digest))
    for what, digests in groups.items():
        first_name, first = digests[0]
        for name, digest in digests[1:]:
            if digest != first:
                return f"{what} differs between {first_name} and {name}"
    return ""


# --------------------------------------------------------------------------- commit


def commit(move: Move, plan: Plan, dones: Mapping[str, Done]) -> None:
    """The plan's membership is the job's from now on."""
    state = move.state
    move.append(CommitRecorded(number=plan.number))
    incidents.note(move, "committed")
    names = tuple(member.incarnation for member in plan.membership.members)
    incidents.keep_dones(move, plan, tuple(dones[n] for n in names if n in dones))
    move.state = replace(
        move.state,
        membership=plan.membership,
        target=plan.target,
        is_fresh=plan.is_fresh_start,
        identities=_identities(state.identities, plan, dones),
        step=max(plan.target.step, 0),
        progress_gate=plan.target.step - 1,
        progress_at=move.now,
    )
    _assign_roles(move, plan)
    shelf.on_commit(move, plan)
    move.enter(
        Training(
            unacknowledged=names,
            untracked=names if plan.is_fresh_start else (),
            committed_at=move.now,
        )
    )
    body = Commit(term=state.term, number=plan.number)
    move.tell_in_halves((*names, *plan.leavers), body, plan.number)
    _answer(move, plan)
    move.because(f"generation {plan.number} committed at step {plan.target.step}")


def _identities(known: tuple[str, ...], plan: Plan, dones: Mapping[str, Done]) -> tuple[str, ...]:
    if plan.is_fresh_start:
        return ()
    identities = list(known) + [""] * (plan.membership.world_size - len(known))
    for rank, member in enumerate(plan.membership.members):
        done = dones.get(member.incarnation)
        if done is not None and done.identity:
            identities[rank] = done.identity
    return tuple(identities)


def _assign_roles(move: Move, plan: Plan) -> None:
    for member in plan.membership.members:
        worker = move.state.workers.get(member.incarnation)
        if worker is not None:
            move.keep_worker(replace(worker, role="member", readiness=None, reason=""))
    for name in sorted(move.state.workers):
        worker = move.state.workers[name]
        if worker.role == "leaver":
            release(move, name)  # of an earlier switchover: nobody can need its state any more
        elif worker.role == "member" and plan.membership.rank_of(name) is None:
            _dismiss(move, plan, name)


def _dismiss(move: Move, plan: Plan, name: str) -> None:
    move.state = replace(move.state, retired=move.state.retired | {name})
    if plan.kind == "planned":
        leaver = replace(move.state.workers[name], role="leaver", released_number=plan.number)
        move.keep_worker(leaver)
    else:
        reason = f"replaced in generation {plan.number}"
        fence = Fence(term=move.state.term, generation=plan.base_generation, reason=reason)
        move.tell(name, fence)
        pool.end(move, name, reason)


def release(move: Move, name: str) -> None:
    """A leaver's state is needed no more; its exit is awaited."""
    worker = move.state.workers[name]
    if worker.role == "leaver":
        move.keep_worker(replace(worker, role="ending", ending_since=move.now, reason="released"))


def _answer(move: Move, plan: Plan) -> None:
    incident = move.state.incident
    if incident is None or not incident.request:
        return
    moves = ", ".join(
        f"rank {member.rank} on {member.machine}"
        for member in plan.membership.members
        if member.incarnation in plan.joiners
    )
    text = f"generation {plan.number} from step {plan.target.step}: {moves}"
    reply = OperatorReply(
        request=incident.request, is_accepted=True, is_final=True, text=text, number=plan.number
    )
    move.reply(reply)
    move.state = replace(move.state, incident=replace(incident, request=""))


# --------------------------------------------------------------------------- abort


def abort(move: Move, plan: Plan, reason: str) -> None:
    """The plan's number will never be a generation; the phase is left to the caller."""
    move.append(AbortRecorded(number=plan.number, reason=reason))
    body = Abort(term=move.state.term, number=plan.number, reason=reason)
    for name in dict.fromkeys((*lookup.participants(plan), *plan.joiners)):
        move.tell(name, body)
    incidents.note(move, "aborted")
    move.because(f"abort {plan.number}: {reason}")
