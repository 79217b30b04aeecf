"""Which version the job goes on at, and where each joiner gets its state. Pure arithmetic.

Rule C4 of the protocol: the version is the highest any stayer has applied; everyone else must be
there or be held at the gate right before it. Where those who have passed that gate can all go back
in front of it, and another is there, they do: what follows it needs everybody. A stayer that
contradicts this (C11) is an error of the protocol, not something to recover from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainmover.protocol.messages import Report, Source, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Version at which a new generation starts."""

    target: Version
    result: tuple[int, ...] = ()
    """Merged flags of the gate in front of it, for those who are held there."""
    contradiction: str = ""
    """Why the reports can't all be true; then the rest means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stayer:
    """One reporting member."""

    rank: int
    identity: str
    version: Version
    has_entered: bool
    report: Report


def stayer(rank: int, report: Report, generation: int, target: Version, identity: str) -> Stayer:
    """How `report` counts for the committed `generation` that started at `target`.

    One that is prepared for it and has not heard of the commit is at the target (7b).
    """
    is_prepared = report.prepared_number == generation and report.generation != generation
    return Stayer(
        rank=rank,
        identity=report.identity or identity,
        version=target if is_prepared else report.applied,
        has_entered=report.has_entered and not is_prepared,
        report=report,
    )


def agree(stayers: tuple[Stayer, ...]) -> Agreement:
    """The version, or what contradicts."""
    target = max(each.version for each in stayers)
    back = _way_back(stayers, target)
    if back is not None:
        return Agreement(target=back)
    result: tuple[int, ...] = ()
    for each in stayers:
        if each.version == target:
            result = result or each.report.last_result
            continue
        is_held = each.version.step == target.step - 1 and each.has_entered
        if not is_held:
            entered = "entered" if each.has_entered else "not entered"
            text = (
                f"rank {each.rank} is at step {each.version.step} (lineage "
                f"{each.version.lineage}, {entered}) while another has applied step "
                f"{target.step} (lineage {target.lineage})"
            )
            return Agreement(target=target, contradiction=text)
    is_result_needed = any(each.version != target for each in stayers)
    return Agreement(target=target, result=result if is_result_needed else ())


def _way_back(stayers: tuple[Stayer, ...], target: Version) -> Version | None:
    """The version in front of the last gate, if some are there and all others kept it."""
    below = {each.version for each in stayers if each.version != target}
    kept = {each.report.previous for each in stayers if each.version == target}
    return below.pop() if len(below) == 1 and kept == below else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Restoration:
    """A source for each lost rank that has one, and why the others have none."""

    sources: tuple[Source, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """A snapshot of a lost rank that updates could be played on, and where it can be fetched."""

    version: Version
    machine: str
    host: str
    port: int


def choose(
    lost: Mapping[int, str],
    stayers: tuple[Stayer, ...],
    target: Version,
    bases: Mapping[int, tuple[Base, ...]] | None = None,
) -> Restoration:
    """Sources for `lost` (rank -> identity of its bulk state).

    Only stayers serve: a source has to be prepared at exactly the target (protocol 8). Several
    joiners draw from different replicas as far as there are any. A rank without a live replica
    can be played again from one of its `bases` (best first) where its updates since are held.
    """
    sources: list[Source] = []
    missing: list[str] = []
    used: dict[str, int] = {}
    for rank in sorted(lost):
        identity = lost[rank]
        replicas = [each for each in stayers if identity and each.identity == identity]
        own = _holder(rank, stayers, target)
        played = None if replicas else _played(rank, stayers, target, (bases or {}).get(rank, ()))
        if played is None and not replicas:
            missing.append(f"rank {rank}: no live replica of its state")
        elif own is None:
            missing.append(f"rank {rank}: nobody holds its personal state of step {target.step}")
        elif played is not None:
            base, holder = played
            sources.append(_from_increments(rank, base, holder, own, stayers, target))
        else:
            # Whoever still has to apply the held gate serves later than one that has.
            replicas.sort(
                key=lambda each: (
                    used.get(each.report.incarnation, 0),
                    each.version != target,
                    each.rank,
                )
            )
            bulk = replicas[0].report.incarnation
            used[bulk] = used.get(bulk, 0) + 1
            sources.append(
                Source(rank=rank, bulk_from=bulk, own_from=own, shared_from=bulk, kind="replica")
            )
    return Restoration(sources=tuple(sources), missing=tuple(missing))


def _played(
    rank: int, stayers: tuple[Stayer, ...], target: Version, bases: tuple[Base, ...]
) -> tuple[Base, str] | None:
    """A snapshot and whoever holds every update from there to the target."""
    at_target = next((base for base in bases if base.version == target), None)
    if at_target is not None:
        return at_target, ""
    held = [
        (each.report.incarnation, one.replay_from)
        for each in stayers
        for one in each.report.personal
        if (one.owner_rank, one.version) == (rank, target) and one.replay_from is not None
    ]
    reached = [
        (base, holder)
        for holder, begin in held
        for base in bases
        if begin.step <= base.version.step < target.step
    ]
    return next(iter(reached), None)


def _from_increments(
    rank: int, base: Base, holder: str, own: str, stayers: tuple[Stayer, ...], target: Version
) -> Source:
    shared = min(stayers, key=lambda each: (each.version != target, each.rank))
    return Source(
        rank=rank,
        bulk_from=holder,
        own_from=own,
        shared_from=shared.report.incarnation,
        kind="increments",
        machine=base.machine,
        host=base.host,
        port=base.port,
        base=base.version,
    )


def _holder(rank: int, stayers: tuple[Stayer, ...], target: Version) -> str | None:
    for each in stayers:
        for held in each.report.personal:
            # A gate copy of leaves that change behind the gate is never used (B1).
            if held.owner_rank == rank and held.version == target and held.is_final:
                return each.report.incarnation
    return None


def vertex_cover(edges: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """Fewest ranks that touch all `edges`; the lexicographically first of the smallest.

    Exact while few ranks are involved, else by highest degree: never both ends where one does.
    """
    unique = sorted({(min(edge), max(edge)) for edge in edges if edge[0] != edge[1]})
    ranks = sorted({rank for edge in unique for rank in edge})
    if len(ranks) > 12:
        return _greedy_cover(unique)
    best: tuple[int, ...] = tuple(ranks)
    for mask in range(1 << len(ranks)):
        chosen = tuple(rank for bit, rank in enumerate(ranks) if mask >> bit & 1)
        if len(chosen) > len(best) or (len(chosen) == len(best) and chosen >= best):
            continue
        if all(a in chosen or b in chosen for a, b in unique):
            best = chosen
    return best


def _greedy_cover(edges: list[tuple[int, int]]) -> tuple[int, ...]:
    left, chosen = list(edges), []
    while left:
        degree: dict[int, int] = {}
        for edge in left:
            for rank in edge:
                degree[rank] = degree.get(rank, 0) + 1
        worst = min(degree, key=lambda rank: (-degree[rank], rank))
        chosen.append(worst)
        left = [edge for edge in left if worst not in edge]
    return tuple(sorted(chosen))
