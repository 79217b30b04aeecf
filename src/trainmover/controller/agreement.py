"""What the reports allow: who stays, where joiners can be restored from, and the plan of it.

Decides nothing about waiting: asked again whenever a report comes or a worker goes. Upholds C4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from trainmover.controller import lookup, sources
from trainmover.controller.move import Move
from trainmover.controller.state import START, Gathering, Worker
from trainmover.protocol import exits
from trainmover.protocol.messages import Plan, Report
from trainmover.topology import Member, Membership


@dataclass(frozen=True, kw_only=True, slots=True)
class Impossible:
    """Why no plan can be made."""

    code: int
    reason: str


def stayers_of(move: Move, reports: Mapping[str, Report]) -> tuple[sources.Stayer, ...]:
    """Members that have reported a usable state and still live."""
    state = move.state
    found = []
    for member in lookup.members(state):
        report = reports.get(member.incarnation)
        worker = state.workers.get(member.incarnation)
        if report is None or worker is None or worker.role != "member":
            continue
        machine = state.machines.get(worker.machine)
        if report.broken_state or (machine is not None and machine.is_lost):
            continue
        identity = lookup.identity_of(state, member.rank)
        found.append(sources.stayer(member.rank, report, state.generation, state.target, identity))
    return tuple(found)


def restoration(
    move: Move,
    stayers: tuple[sources.Stayer, ...],
    lost: tuple[int, ...],
    joining: Mapping[int, str] | None = None,
) -> sources.Restoration:
    """Sources for `lost` at the version that `stayers` agree on.

    A rank whose identity is not known counts as restorable until its joiner (`joining`: rank ->
    incarnation) has built `main` and shows it.
    """
    wanted = {rank: _identity(move, rank, stayers, joining or {}) for rank in lost}
    if joining is None:
        wanted = {rank: identity for rank, identity in wanted.items() if identity}
    return sources.choose(wanted, stayers, sources.agree(stayers).target)


def _identity(
    move: Move, rank: int, stayers: tuple[sources.Stayer, ...], joining: Mapping[int, str]
) -> str:
    """What is known, else what the joiner built as that rank, else what everybody shares."""
    known = lookup.identity_of(move.state, rank)
    joiner = move.state.workers.get(joining.get(rank, ""))
    if known or joiner is None or joiner.readiness is None:
        return known
    built = joiner.readiness.identity
    if joiner.readiness.as_rank == rank or all(each.identity == built for each in stayers):
        return built
    return ""


def is_fresh_start(move: Move, reports: Mapping[str, Report], lost: tuple[int, ...]) -> bool:
    """Whether nobody has state worth keeping, or nobody could restore a rank before step 1.

    Nothing is lost by entering `main` anew at step 0: it gives the same numbers again.
    """
    stayers = stayers_of(move, reports)
    if not stayers:
        return True
    if sources.agree(stayers).target.step > 0:
        return False
    if any(each.report.is_building for each in stayers):
        return True
    if not all(lookup.identity_of(move.state, rank) for rank in lost):
        return True
    return bool(restoration(move, stayers, lost).missing)


def build(move: Move, phase: Gathering, is_fresh: bool) -> Plan | Impossible:
    """The plan that puts the seats' workers in place of the lost ranks."""
    state = move.state
    joining = {seat.rank: seat.incarnation for seat in phase.seats}
    lost = tuple(sorted(joining))
    stayers = stayers_of(move, phase.reports)
    members = tuple(
        _member_of(move.state.workers[joining[m.rank]], m.rank) if m.rank in joining else m
        for m in lookup.members(state)
    )
    plan = Plan(
        number=phase.number,
        kind="unplanned",
        base_generation=state.generation,
        target=START,
        membership=Membership(generation=phase.number, members=members),
        leavers=tuple(lookup.members(state)[rank].incarnation for rank in lost),
        joiners=tuple(joining[rank] for rank in lost),
        is_fresh_start=is_fresh,
        reason=state.incident.reason if state.incident is not None else "",
    )
    if is_fresh:
        return plan
    agreed = sources.agree(stayers)
    found = restoration(move, stayers, lost, joining)
    if agreed.contradiction or found.missing:
        text = agreed.contradiction or "; ".join(found.missing)
        code = exits.PROTOCOL_FAILED if agreed.contradiction else exits.CANNOT_RESTORE
        return Impossible(code=code, reason=text)
    return msgspec.structs.replace(
        plan,
        target=agreed.target,
        sources=found.sources,
        result=agreed.result,
        attempts=max(each.report.attempts for each in stayers),
    )


def _member_of(worker: Worker, rank: int) -> Member:
    return Member(
        rank=rank,
        incarnation=worker.incarnation,
        machine=worker.machine,
        host=worker.host,
        port=worker.port,
    )
