"""What the reports allow: who stays, and where joiners can be restored from among those who live.

Decides nothing about waiting: asked again whenever a report comes or a worker goes. Upholds C4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainmover.controller import lookup, shelf, sources
from trainmover.controller.move import Move
from trainmover.protocol.messages import Report, Source, Version


def is_prepared_for_current(move: Move, report: Report) -> bool:
    """Whether it stands at the committed generation's start without having heard of the commit."""
    generation = move.state.generation
    return report.prepared_number == generation and report.generation != generation


def is_half_rolled_back(move: Move, report: Report) -> bool:
    """Whether its state is good for another roll-back only."""
    return report.is_half_rolled_back and not is_prepared_for_current(move, report)


def reporters_of(move: Move, reports: Mapping[str, Report]) -> tuple[sources.Stayer, ...]:
    """Members that have reported and still live, whatever their state is."""
    state = move.state
    found = []
    for member in lookup.members(state):
        report = reports.get(member.incarnation)
        worker = state.workers.get(member.incarnation)
        if report is None or worker is None or worker.role != "member":
            continue
        machine = state.machines.get(worker.machine)
        if machine is not None and machine.is_lost:
            continue
        identity = lookup.identity_of(state, member.rank)
        found.append(sources.stayer(member.rank, report, state.generation, state.target, identity))
    return tuple(found)


def stayers_of(move: Move, reports: Mapping[str, Report]) -> tuple[sources.Stayer, ...]:
    """Those of them whose state can be used."""
    return tuple(
        each
        for each in reporters_of(move, reports)
        if not each.report.broken_state or is_prepared_for_current(move, each.report)
    )


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
    unlike = move.state.kept.unlike_now()
    wanted = {rank: _identity(move, rank, stayers, joining or {}) for rank in lost}
    for rank, identity in wanted.items():
        if identity in unlike:
            wanted[rank] = f"{identity} of rank {rank}"  # nobody else's
    if joining is None:
        wanted = {rank: identity for rank, identity in wanted.items() if identity}
    target = sources.agree(stayers).target
    bases = {rank: _bases(move, rank, target) for rank in wanted}
    return sources.choose(wanted, stayers, target, bases)


def _bases(move: Move, rank: int, target: Version) -> tuple[sources.Base, ...]:
    """Snapshots of `rank` that can be fetched and that its updates may be played on, newest first.

    None where no rank backs up its steps, or where playing them to `target` has failed before.
    """
    kept = move.state.kept
    if not kept.keeping.snapshot.ships_increments or (rank, target) in kept.unplayable:
        return ()
    found = [
        sources.Base(version=held.version, machine=name, host=store.host, port=store.port)
        for name, store in shelf.reachable(move.state).items()
        for held in store.held
        if held.rank == rank
        and held.version.step <= target.step
        and not kept.is_void(held.version)
        and (name, rank, held.version) not in kept.distrusted
    ]
    return tuple(sorted(found, key=lambda base: base.version, reverse=True))


def distrust_source(move: Move, peer: str, source: Source, target: Version) -> None:
    """A rank could not be played again: from another copy next time, or not to that version."""
    kept = move.state.kept
    if source.base is not None and peer == source.machine:
        shelf.distrust(move, peer, source.rank, source.base)
        return
    if peer not in ("", source.bulk_from):
        return  # a stayer that served something else is gone
    key = (source.rank, target)
    if key not in kept.unplayable:
        shelf.keep(move, replace(kept, unplayable=(*kept.unplayable, key)[-64:]))
    move.because(f"the updates of rank {source.rank} can't be played to step {target.step}")


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
