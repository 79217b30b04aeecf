"""After a loss: freeze, collect reports, decide version and joiners, issue the plan.

Decides who is lost, which rung of the ladder each lost rank takes (with `seats`), at which version
the job goes on and from where joiners get their state (with `sources`). One incident may need
several freezes: whatever happens inside aborts the open number and freezes under a higher one.
Upholds C2-C5, C7 and C11 of the protocol, and the rule that several losses are one incident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainmover.controller import (
    agreement,
    ending,
    incidents,
    looking,
    lookup,
    plans,
    pool,
    restoring,
    seats,
    sources,
    tails,
)
from trainmover.controller.move import Move
from trainmover.controller.state import (
    Freezing,
    Gathering,
    Seat,
    Switching,
    Training,
    Worker,
)
from trainmover.protocol import exits
from trainmover.protocol.journal import AbortRecorded, Culprit, IncidentOpened
from trainmover.protocol.messages import Edge, Freeze, Plan, Report

NOT_PREPARED = "not prepared in time"
"""Reason of a plan that was given up because somebody in it was silent."""
FREEZE_LIMIT = 30
"""Freezes at one step after which an incident is called endless."""

# --------------------------------------------------------------------------- freeze


def open_incident(move: Move, reason: str, culprits: tuple[Culprit, ...] = ()) -> None:
    """First sign of a loss in the committed generation: freeze at once."""
    if move.state.failure is not None:
        return  # the script has failed; what breaks now breaks because of that
    count = move.state.incident_count + 1
    limit = move.state.config.max_incidents
    if count > limit:
        text = f"incident {count}, at most {limit} are allowed: {reason}"
        ending.stop(move, exits.TOO_MANY_INCIDENTS, text)
        return
    move.state = replace(move.state, incident_count=count)
    incidents.begin(move, reason=reason, is_planned=False)
    incidents.note(move, "detected")
    incidents.blame(move, culprits)
    start_freeze(move, reason, is_counted=True)


def start_freeze(move: Move, reason: str, *, is_counted: bool) -> None:
    """Give out a number, journal it, and ask everyone to pass no older gate and to report."""
    step = lookup.known_step(move.state)
    if move.count_try("freeze", 0, step) > FREEZE_LIMIT:
        text = f"{FREEZE_LIMIT} recoveries at step {step} have failed, the last one: {reason}"
        ending.stop(move, exits.TOO_MANY_INCIDENTS, text)
        return
    number = move.next_number()
    base = move.state.generation
    move.append(
        IncidentOpened(number=number, base_generation=base, reason=reason, is_counted=is_counted)
    )
    move.reached("detected", number)
    deadline = move.in_(move.state.config.report_timeout_s)
    move.enter(Freezing(number=number, deadline=deadline))
    for name in frozen_workers(move):
        move.tell(name, Freeze(term=move.state.term, number=number))
    incidents.note(move, "frozen")
    move.because(f"freeze {number}: {reason}")
    check(move)


def resume_incident(move: Move, reason: str) -> None:
    """Another life of the controller had frozen the job: freeze it again, not counted again."""
    incidents.begin(move, reason=reason, is_planned=False)
    incidents.note(move, "resumed")
    start_freeze(move, reason, is_counted=False)


def resume_record(move: Move, plan: Plan) -> None:
    """The record of a switchover whose plan is sent again."""
    if plan.kind != "form":
        incidents.begin(move, reason=plan.reason, is_planned=plan.kind == "planned")
        incidents.note(move, "resumed")


def frozen_workers(move: Move) -> tuple[str, ...]:
    """Whom a freeze is sent to: members, standbys and joiners, whoever may hold something."""
    standbys = tuple(w.incarnation for w in lookup.standbys(move.state) if w.is_up)
    alive = tuple(n for n in lookup.member_names(move.state) if n in move.state.workers)
    return (*alive, *standbys)


def refreeze(move: Move, reason: str, culprits: tuple[Culprit, ...] = ()) -> None:
    """What was under way can't succeed: abort its number and begin again with a higher one."""
    incidents.blame(move, culprits)
    match move.state.phase:
        case Switching(plan=plan):
            plans.abort(move, plan, reason)
        case Freezing(number=number) | Gathering(number=number):
            move.append(AbortRecorded(number=number, reason=reason))
        case _:
            return
    start_freeze(move, reason, is_counted=False)


# --------------------------------------------------------------------------- reports


def on_report(move: Move, worker: Worker, report: Report) -> None:
    """An answer to a freeze, maybe to an older or a later one than ours."""
    phase = move.state.phase
    move.note_number(report.number)
    if isinstance(phase, Training) and worker.role == "member":
        if report.number > move.state.generation:
            open_incident(move, f"{worker.incarnation} is frozen for {report.number}")
        return
    if not isinstance(phase, Freezing | Gathering):
        return
    if report.number > phase.number:
        # Promised to a controller whose journal we don't have: ours would be refused for ever.
        refreeze(move, f"{worker.incarnation} has promised {report.number}")
        return
    if report.number < phase.number or worker.role == "ending":
        return
    reports = {**phase.reports, report.incarnation: report}
    is_member = report.incarnation in lookup.member_names(move.state)
    if is_member:
        note_edges(move, report.incarnation, report.edges)
    if isinstance(phase, Freezing):
        move.enter(replace(phase, reports=reports))
        check(move)
    elif report.incarnation not in phase.reports and is_member:
        # It came late, but before anything was decided without it.
        gather_again(move, replace(phase, reports=reports))


def note_edges(move: Move, seen_by: str, edges: tuple[Edge, ...]) -> None:
    """Remember failed connections between members of the committed generation."""
    incident, membership = move.state.incident, move.state.membership
    if incident is None or membership is None:
        return
    rank = membership.rank_of(seen_by)
    found = list(incident.edges)
    for edge in edges:
        peer = membership.rank_of(edge.peer)
        if rank is None or peer is None or rank == peer:
            continue
        pair = (min(rank, peer), max(rank, peer))
        if pair not in found:
            found.append(pair)
    move.state = replace(move.state, incident=replace(incident, edges=tuple(sorted(found))))


def check(move: Move) -> None:
    """Decide when every member that can report has, or the time is up."""
    phase = move.state.phase
    if not isinstance(phase, Freezing) or move.state.failure is not None:
        return  # a failed script ends the job: no standby is spent on it (C87)
    awaited = [n for n in lookup.member_names(move.state) if n not in phase.reports]
    awaited = [n for n in awaited if can_report(move, n)]
    if not awaited or (move.now >= phase.deadline and not tails.prolong(move, phase, awaited)):
        _decide(move, phase)


def can_report(move: Move, name: str) -> bool:
    """Whether waiting for a member's report makes sense."""
    worker, membership = move.state.workers.get(name), move.state.membership
    if worker is None or worker.role == "ending" or pool.is_stopped(move, worker):
        return False
    machine = move.state.machines.get(worker.machine)
    if machine is not None and machine.is_lost:
        return False
    if machine is not None and machine.is_linked:
        return True
    # A closed link alone proves nothing; inside an incident it does: at once where peers' broken
    # edges name the rank, else after a moment (C7).
    if machine is None or machine.unlinked_at is None:
        return True
    incident = move.state.incident
    rank = membership.rank_of(name) if membership is not None else None
    edges = incident.edges if incident is not None else ()
    is_named = any(rank in edge for edge in edges)
    return not is_named and not move.has_waited(machine.unlinked_at, move.state.config.link_grace_s)


# --------------------------------------------------------------------------- decision


def _decide(move: Move, phase: Freezing) -> None:
    everyone = agreement.reporters_of(move, phase.reports)
    if not everyone and _may_be_cut_off(move, phase):
        return
    way = _way(move, phase.reports)
    if way is None:
        return
    step = max([move.state.step, way.target.step, *(each.version.step for each in everyone)])
    move.state = replace(move.state, step=step)
    if way.kind != "none" and everyone and not way.lost(move.state):
        if not _replace_unconnectable(move, step):
            return
        way = _way(move, phase.reports)
    if way is None:
        return
    if way.kind == "none":
        looking.hope_or_stop(move, way.reason)
        return
    incidents.note(move, "reported", ["", *phase.reports][-1])
    move.reached("all_reported", phase.number)
    _begin_seats(move, phase.number, phase.reports, way, ())


def _way(move: Move, reports: Mapping[str, Report]) -> restoring.Way | None:
    """How the group goes on; None: the reports contradict the protocol, and the job has ended."""
    stayers = agreement.stayers_of(move, reports)
    contradiction = sources.agree(stayers).contradiction if stayers else ""
    if contradiction:
        ending.stop(move, exits.PROTOCOL_FAILED, contradiction)
        return None
    return restoring.way_of(move, reports)


def _may_be_cut_off(move: Move, phase: Freezing) -> bool:
    """All agents silent at once: more likely we are the one who is cut off, so wait a while.

    Once one is heard again, the others get as long as a silence may last.
    """
    config = move.state.config
    is_heard = any(machine.is_linked for machine in move.state.machines.values())
    limit_s = config.lost_after_s if is_heard else config.machine_wait_s
    started = move.state.incident.started_at if move.state.incident else phase.deadline
    alive = [n for n in lookup.member_names(move.state) if n in move.state.workers]
    alive = [n for n in alive if n not in phase.reports]
    if not alive or move.has_waited(started, limit_s):
        return False
    deadline = move.in_(config.report_timeout_s)
    move.enter(replace(phase, deadline=deadline))
    return True


def _replace_unconnectable(move: Move, step: int) -> bool:
    """Everyone lives: reconnect a few times, then replace the fewest ranks that explain it.

    False: nothing explains it, and the job has ended.
    """
    incident, config = move.state.incident, move.state.config
    edges = incident.edges if incident is not None else ()
    first = edges[0][0] if edges else 0
    count = move.count_try("reconnect", first, step)
    if config.may_reconnect and count <= config.max_tries:
        return True
    cover = sources.vertex_cover(edges)
    if not cover:
        text = f"connections broke {count} times at step {step} and nobody could say which"
        ending.stop(move, exits.TOO_MANY_INCIDENTS, text)
        return False
    replace_elsewhere(move, cover, "its connections could not be made again")
    return True


def replace_elsewhere(move: Move, ranks: tuple[int, ...], evidence: str) -> None:
    """These ranks' machines are to blame: end their workers, use other machines."""
    incident = move.state.incident
    if incident is not None:
        elsewhere = tuple(sorted({*incident.elsewhere, *ranks}))
        move.state = replace(move.state, incident=replace(incident, elsewhere=elsewhere))
    for rank in ranks:
        member = lookup.members(move.state)[rank]
        culprit = Culprit(
            rank=rank,
            incarnation=member.incarnation,
            machine=member.machine,
            evidence=evidence,
        )
        incidents.blame(move, (culprit,))
        pool.end(move, member.incarnation, evidence)


# --------------------------------------------------------------------------- joiners and plan


def _begin_seats(
    move: Move,
    number: int,
    reports: Mapping[str, Report],
    way: restoring.Way,
    before: tuple[Seat, ...],
) -> None:
    lost = way.lost(move.state)
    for rank in lost:
        name = lookup.members(move.state)[rank].incarnation
        report = reports.get(name)
        evidence = _why_lost(move, name)
        if report is not None and report.broken_state:
            evidence = f"its state was touched by a dropped value: {report.broken_state}"
            pool.end(move, name, evidence)
        _blame_rank(move, rank, evidence)
    kept = {seat.rank: seat for seat in before}
    chosen = tuple(
        kept[rank] if rank in kept else seats.open_seat(move, rank) for rank in sorted(lost)
    )
    move.enter(Gathering(number=number, reports=reports, seats=chosen, since=move.now))
    advance(move)


def _why_lost(move: Move, name: str) -> str:
    worker = move.state.workers.get(name)
    if worker is None:
        return "its process has ended"
    machine = move.state.machines.get(worker.machine)
    if machine is not None and (machine.is_lost or machine.unlinked_at is not None):
        return f"{machine.name} is gone: its link has closed"
    if pool.is_stopped(move, worker):
        return f"its process was stopped for {move.state.config.stopped_limit_s:g} s"
    return f"did not report within {move.state.config.report_timeout_s:g} s"


def _blame_rank(move: Move, rank: int, evidence: str) -> None:
    member = lookup.members(move.state)[rank]
    culprit = Culprit(
        rank=rank, incarnation=member.incarnation, machine=member.machine, evidence=evidence
    )
    incidents.blame(move, (culprit,))


def gather_again(move: Move, phase: Gathering) -> None:
    """A member was lost or found while joiners are awaited: the same freeze, other seats."""
    way = _way(move, phase.reports)
    if way is None:
        return
    if way.kind == "none":
        freezing = Freezing(number=phase.number, reports=phase.reports, deadline=move.now)
        move.enter(freezing)
        _decide(move, freezing)
        return
    _begin_seats(move, phase.number, phase.reports, way, phase.seats)


def advance(move: Move) -> None:
    """Fill seats; when all are taken by somebody who can join, issue the plan."""
    phase = move.state.phase
    if not isinstance(phase, Gathering) or move.state.failure is not None:
        return
    way = restoring.way_of(move, phase.reports)
    seated = {seat.rank for seat in phase.seats}
    if way.kind == "none" or not seated.issuperset(way.lost(move.state)):
        gather_again(move, phase)
        return
    seats.fill(move, way.is_fresh)
    phase = move.state.phase
    if isinstance(phase, Gathering) and seats.are_taken(move, phase, way.is_fresh):
        _issue(move, phase)


def _issue(move: Move, phase: Gathering) -> None:
    joining = {seat.rank: seat.incarnation for seat in phase.seats}
    # What the joiners have built shows whose replicas they are.
    way = restoring.way_of(move, phase.reports, joining)
    if way.kind == "none" and looking.has_hope(move, phase.number):
        return
    number = phase.number
    if joining:
        move.reached("joiner_chosen", number)
        incidents.note(move, "joiner_ready", incidents.latest_joiner(move, joining.values()))
    plan = restoring.build(move, phase, way)
    if isinstance(plan, restoring.Impossible):
        ending.stop(move, plan.code, plan.reason)
        return
    move.reached("decided", number)
    move.reached("source_chosen", number)
    incidents.note(move, "decided")
    plans.issue(move, plan)


# --------------------------------------------------------------------------- too late


def on_late_cut_over(move: Move, phase: Switching) -> None:
    """Not everyone was prepared in time: again, without joiners that were asked and silent."""
    silent = [name for name in lookup.participants(phase.plan) if name not in phase.dones]
    for name in silent:
        if name in phase.plan.joiners:
            pool.end(move, name, "was not prepared in time")
    limit = move.state.config.cut_over_timeout_s
    refreeze(move, f"{NOT_PREPARED} ({limit:g} s): {', '.join(silent)}")
