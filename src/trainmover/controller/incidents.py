"""The record of one switchover, from its first sign to the first gate behind it.

Decides what an incident report says and when it is finished. Decides nothing about recovery.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import msgspec

from trainmover.controller import classes, lookup, pace
from trainmover.controller.move import Move
from trainmover.controller.state import Incident, Origin, Training
from trainmover.protocol.journal import (
    Culprit,
    IncidentClosed,
    IncidentReport,
    PhaseTime,
    RankMarks,
    RolePlayed,
)
from trainmover.protocol.messages import Done, FirstGate, Plan
from trainmover.units import in_seconds

CLOSED_LIMIT = 100
Outcome = Literal[
    "planned", "reconnect", "respawn", "standby", "rollback", "restored", "fresh_start"
]


def begin(move: Move, *, reason: str, is_planned: bool, request: str = "") -> None:
    """Start a record; one that still waits for marks is closed as it is."""
    close(move)
    incident = Incident(
        base_generation=move.state.generation,
        is_planned=is_planned,
        reason=reason,
        started_at=move.now,
        before=lookup.members(move.state),
        request=request,
    )
    move.state = replace(move.state, incident=incident)


def note(move: Move, name: str, waited_for: str = "") -> None:
    """The incident has reached a phase; the first time counts, a repeated attempt gets a number."""
    incident = move.state.incident
    if incident is not None and len(incident.phases) < CLOSED_LIMIT:
        seen = sum(known == name or known.startswith(f"{name} #") for known, _ in incident.phases)
        label = name if seen == 0 else f"{name} #{seen + 1}"
        phases = (*incident.phases, (label, move.now))
        waited = (*incident.waited, (label, waited_for)) if waited_for else incident.waited
        changed = replace(incident, phases=phases, waited=waited)
        move.state = replace(move.state, incident=changed)


def latest_joiner(move: Move, names: Iterable[str]) -> str:
    """The joiner that was ready last, and what took it so long; empty: all were ready before."""
    incident = move.state.incident
    workers = [move.state.workers[name] for name in names if name in move.state.workers]
    late = [each for each in workers if incident and (each.ready_at or 0) > incident.started_at]
    if incident is None or not late:
        return ""
    last = max(late, key=lambda each: each.ready_at or 0)
    assert last.ready_at is not None
    told_at = max(last.ordered_at or last.launched_at, incident.started_at)
    up_s, built_s = (
        in_seconds(told_at - max(last.launched_at, incident.started_at)),
        in_seconds(last.ready_at - told_at),
    )
    return f"{last.incarnation} (process {up_s:.2f} s, main built and rehearsed {built_s:.2f} s)"


def blame(move: Move, culprits: tuple[Culprit, ...]) -> None:
    """Add culprits, each worker once."""
    incident = move.state.incident
    if incident is None:
        return
    known = {culprit.incarnation for culprit in incident.culprits}
    new = tuple(culprit for culprit in culprits if culprit.incarnation not in known)
    changed = replace(incident, culprits=incident.culprits + new)
    move.state = replace(move.state, incident=changed)


def on_first_gate(move: Move, rank: int, body: FirstGate) -> None:
    """Marks of a rank; the first of them ends the interruption."""
    incident = move.state.incident
    if incident is None or any(marks.rank == rank for marks in incident.marks):
        return
    if body.generation <= incident.base_generation:
        return  # repeated word of the generation that this switchover leaves
    if incident.first_gate_at is None:
        note(move, "first_gate")
    incident = move.state.incident
    assert incident is not None
    move.state = replace(
        move.state,
        incident=replace(
            incident,
            marks=(
                *incident.marks,
                RankMarks(rank=rank, marks=body.marks, traffic=body.traffic),
            ),
            first_gate_at=incident.first_gate_at or move.now,
        ),
    )
    if len(incident.marks) + 1 >= move.state.spec.world_size:
        close(move)


def close(move: Move) -> None:
    """Write the report of a switchover whose generation has passed a gate, or was left again."""
    incident, membership = move.state.incident, move.state.membership
    if incident is None:
        return
    if membership is None or membership.generation <= incident.base_generation:
        move.state = replace(move.state, incident=None)
        return
    roles = tuple(
        _role(move, incident, rank, member.incarnation)
        for rank, member in enumerate(membership.members)
    )
    report = IncidentReport(
        number=membership.generation,
        kind=_kind(move, incident),
        base_generation=incident.base_generation,
        reason=incident.reason,
        culprits=incident.culprits,
        phases=_times(incident),
        roles=roles,
        marks=_marks(move, incident),
        resumed_step=move.state.target.step,
        steps_repeated=incident.steps_repeated,
        outcome=f"generation {membership.generation} from step {move.state.target.step}",
    )
    _file(move, report)


def give_up(move: Move, number: int, outcome: str) -> None:
    """Write the report of a planned switchover that was aborted."""
    incident = move.state.incident
    if incident is None:
        return
    report = IncidentReport(
        number=number,
        kind="aborted",
        base_generation=incident.base_generation,
        reason=incident.reason,
        culprits=incident.culprits,
        phases=_times(incident),
        resumed_step=lookup.known_step(move.state),
        outcome=outcome,
    )
    _file(move, report)


def _file(move: Move, report: IncidentReport) -> None:
    move.append(IncidentClosed(report=report))
    closed = (*move.state.closed, report)[-CLOSED_LIMIT:]
    move.state = replace(move.state, incident=None, closed=closed)


def keep_dones(move: Move, plan: Plan, dones: tuple[Done, ...]) -> None:
    """What the members said when they were prepared; whether a step is done again."""
    incident = move.state.incident
    if incident is None:
        return
    repeated = int(plan.kind == "unplanned")
    if plan.is_fresh_start:
        repeated = max(0, lookup.known_step(move.state) - plan.target.step)
    origin: Origin = ""
    if plan.is_rollback or plan.restore:
        repeated = max(0, lookup.known_step(move.state) - plan.target.step) + 1
        origin = "snapshot" if plan.is_rollback else "checkpoint"
    served = tuple((one.rank, one.machine) for one in plan.sources if one.machine)
    changed = replace(incident, dones=dones, steps_repeated=repeated, origin=origin, served=served)
    move.state = replace(move.state, incident=changed)


def has_to_close(move: Move) -> bool:
    """Whether the marks of the last ranks have been waited for long enough."""
    incident = move.state.incident
    return (
        incident is not None
        and incident.first_gate_at is not None
        and isinstance(move.state.phase, Training)
        and move.has_waited(incident.first_gate_at, move.state.config.marks_grace_s)
    )


def _times(incident: Incident) -> tuple[PhaseTime, ...]:
    waited = dict(incident.waited)
    return tuple(
        PhaseTime(name=name, after_ns=at - incident.started_at, waited_for=waited.get(name, ""))
        for name, at in incident.phases
    )


def _marks(move: Move, incident: Incident) -> tuple[RankMarks, ...]:
    by_rank: dict[int, RankMarks] = {}
    membership = move.state.membership
    for done in incident.dones:
        rank = membership.rank_of(done.incarnation) if membership is not None else None
        if rank is not None:
            by_rank[rank] = RankMarks(rank=rank, marks=done.marks)
    for marks in incident.marks:
        before = by_rank[marks.rank].marks if marks.rank in by_rank else ()
        by_rank[marks.rank] = msgspec.structs.replace(marks, marks=before + marks.marks)
    return tuple(by_rank[rank] for rank in sorted(by_rank) if by_rank[rank].marks)


def _role(move: Move, incident: Incident, rank: int, incarnation: str) -> RolePlayed:
    member = lookup.members(move.state)[rank]
    before = incident.before[rank].incarnation if rank < len(incident.before) else ""
    done = next((d for d in incident.dones if d.incarnation == incarnation), None)
    source = ""
    if before != incarnation:
        source = "leaver" if incident.is_planned else "replica"
        if rank in dict(incident.served):
            source = "increments"
    if move.state.is_fresh or incident.origin:
        source = incident.origin or "fresh"
    if done is None:
        return RolePlayed(
            rank=rank,
            machine=member.machine,
            incarnation=incarnation,
            before=before,
            role_class=classes.class_of(move.state, rank),
        )
    return RolePlayed(
        rank=rank,
        machine=member.machine,
        incarnation=incarnation,
        before=before,
        source=source,
        served_by=dict(incident.served).get(rank, ""),
        adopted=done.adopted,
        role_class=classes.class_of(move.state, rank),
        bytes_received=done.bytes_received,
        channels=done.channels,
        slowdown=_slowdown(move, incarnation) if before != incarnation else 0.0,
    )


def _slowdown(move: Move, incarnation: str) -> float:
    worker = move.state.workers.get(incarnation)
    return 0.0 if worker is None else pace.slowdown(move.state, worker)


def _kind(move: Move, incident: Incident) -> Outcome:
    if incident.is_planned:
        return "planned"
    if incident.origin:
        return "rollback" if incident.origin == "snapshot" else "restored"
    if move.state.is_fresh:
        return "fresh_start"
    pairs = tuple(zip(incident.before, lookup.members(move.state), strict=True))
    if all(old.incarnation == new.incarnation for old, new in pairs):
        return "reconnect"
    return "respawn" if all(old.machine == new.machine for old, new in pairs) else "standby"
