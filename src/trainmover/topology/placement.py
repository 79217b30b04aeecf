"""Which machines hold the copies of a machine's snapshots, and what that is worth.

Decides places by fault domain: never the owner's machine, no two copies on one, at least one copy
outside the owner's rack, switch and power domain wherever such a machine exists; the others near,
where sending is cheap. Says why where that can't be had. Pure arithmetic, equal everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb
from typing import Final

from trainmover.topology.domains import (
    LEVELS,
    Domains,
    Level,
    members_by_domain,
    separate_levels,
)

WINDOW: Final = 16
"""Neighbours that are looked at, at each of a few distances, where there are very many machines."""
FAR: Final = (1 << len(LEVELS)) - 1
"""Distance of two machines that no single domain takes together."""
ENUMERATED: Final = 50_000
"""Sets of lost machines up to which recoverability is counted; beyond it is the formula's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Places per owner, and what could not be had."""

    places: Mapping[str, tuple[str, ...]]
    """Machines that hold copies, by owner."""
    reasons: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A placement while it is being made."""

    ring: tuple[str, ...]
    """All machines that may hold copies, neighbours in their domains side by side."""
    domains: Mapping[str, Domains]
    spot: dict[str, int] = field(default_factory=dict)
    load: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    known: dict[tuple[str, ...], bool] = field(default_factory=dict)
    whys: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Answers that are the same for all machines of one rack."""
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    distances: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = field(default_factory=dict)

    def of(self, machine: str) -> Domains:
        return self.domains.get(machine, Domains(machine=machine))

    def path(self, machine: str) -> tuple[str, ...]:
        """Its domains, the greatest first."""
        if machine not in self.paths:
            self.paths[machine] = _path(self.domains, machine)[:-1]
        return self.paths[machine]

    def distance(self, one: str, other: str) -> int:
        """Of two machines: a bit for each level at which they are known to be apart."""
        key = (self.path(one), self.path(other))
        known = self.distances.get(key)
        if known is None:
            apart = separate_levels(self.of(one), self.of(other))
            known = self.distances[key] = sum(1 << LEVELS.index(level) for level in apart)
        return known


def place(
    owners: Sequence[str],
    holders: Sequence[str],
    domains: Mapping[str, Domains],
    copies: int,
    before: Mapping[str, tuple[str, ...]] | None = None,
) -> Placement:
    """Places for the copies of each owner's snapshots.

    Args:
        owners: Machines that play ranks, in rank order.
        holders: Machines that can hold copies, owners among them.
        domains: Fault domains by machine, as far as they are known.
        copies: Wanted per owner, on different machines.
        before: Places so far: kept where they still serve, so that little is sent again.
    """
    ring = tuple(sorted(dict.fromkeys(holders), key=lambda name: _path(domains, name)))
    draft = _Draft(ring=ring, domains=domains)
    draft.spot = {name: index for index, name in enumerate(ring)}
    draft.load = dict.fromkeys(ring, 0)
    for owner in owners:
        kept = _kept(draft, owner, (before or {}).get(owner, ()), copies)
        draft.places[owner] = kept
        for holder in kept:
            draft.load[holder] += 1
    for owner in owners:
        _complete(draft, owner, copies)
    return Placement(places=draft.places, reasons=_reasons(draft, owners, copies))


def _path(domains: Mapping[str, Domains], name: str) -> tuple[str, ...]:
    known = domains.get(name, Domains(machine=name))
    return (*(known.at(level) for level in reversed(LEVELS)), name)


def _kept(draft: _Draft, owner: str, before: tuple[str, ...], copies: int) -> tuple[str, ...]:
    """Places that still serve; one too many gives way to a copy that is far enough."""
    kept = tuple(name for name in before if name in draft.spot and name != owner)[:copies]
    if len(kept) < copies or _has_far(draft, owner, kept):
        return kept
    return kept[:-1] if _could_be_far(draft, owner) else kept


def _could_be_far(draft: _Draft, owner: str) -> bool:
    """Whether any machine at all is outside the owner's domains."""
    key = draft.path(owner)
    if key not in draft.known:
        draft.known[key] = _has_far(draft, owner, draft.ring)
    return draft.known[key]


def _has_far(draft: _Draft, owner: str, names: Sequence[str]) -> bool:
    return any(draft.distance(owner, name) == FAR for name in names if name != owner)


def _complete(draft: _Draft, owner: str, copies: int) -> None:
    while len(draft.places[owner]) < copies:
        chosen = draft.places[owner]
        needs_far = not _has_far(draft, owner, chosen) and _could_be_far(draft, owner)
        pool = [name for name in _options(draft, owner) if name != owner and name not in chosen]
        if needs_far and not _has_far(draft, owner, pool):
            pool = [name for name in draft.ring if name != owner and name not in chosen]
        if not pool:
            return
        pick = min(pool, key=lambda name: _cost(draft, owner, name, needs_far=needs_far))
        draft.places[owner] = (*chosen, pick)
        draft.load[pick] += 1


def _options(draft: _Draft, owner: str) -> Sequence[str]:
    count = len(draft.ring)
    if count <= 4 * WINDOW:
        return draft.ring
    start = draft.spot.get(owner, 0)
    starts = (start - WINDOW // 2, start + count // 4, start + count // 2)
    near = {(first + offset) % count for first in starts for offset in range(WINDOW)}
    return [draft.ring[index] for index in sorted(near)]


def _cost(draft: _Draft, owner: str, name: str, *, needs_far: bool) -> tuple[int, ...]:
    distance = draft.distance(owner, name)
    is_mutual = owner in draft.places.get(name, ())
    around = (draft.spot[name] - draft.spot.get(owner, 0)) % len(draft.ring)
    # Pairs that hold each other's copies fail less often than chains: fewer sets of losses hurt.
    rest = (draft.load[name], not is_mutual)
    return (-distance, *rest, around) if needs_far else (*rest, distance, around)


# --------------------------------------------------------------------------- what can't be had


def _reasons(draft: _Draft, owners: Sequence[str], copies: int) -> tuple[str, ...]:
    if not copies:
        return ("no copies are wanted: a lost machine's state is lost",)
    few = [owner for owner in owners if len(draft.places[owner]) < copies]
    found = []
    if few:
        others = len(set(draft.ring) - {few[0]})
        found.append(
            f"{_names(few)}: {copies} copies are wanted, {others} other machines can hold one"
        )
    by_why: dict[str, list[str]] = {}
    for owner in owners:
        chosen = draft.places[owner]
        if chosen and not _has_far(draft, owner, chosen):
            by_why.setdefault(_why_near(draft, owner), []).append(owner)
    return (*found, *(f"{_names(names)}: {why}" for why, names in by_why.items()))


def _why_near(draft: _Draft, owner: str) -> str:
    key = draft.path(owner)
    if key not in draft.whys:
        draft.whys[key] = _find_why(draft, owner)
    return draft.whys[key]


def _find_why(draft: _Draft, owner: str) -> str:
    mine = draft.of(owner)
    unknown = [level for level in LEVELS if not mine.at(level)]
    if len(unknown) == len(LEVELS):
        return "its fault domains are not known; copies are on other machines only"
    if unknown:
        return f"its {' and '.join(unknown)} is not known; no copy is known to be outside"
    others = [draft.of(name) for name in draft.ring if name != owner]
    shared = [
        level
        for level in LEVELS
        if all(level not in separate_levels(mine, other) for other in others)
    ]
    if shared:
        named = ", ".join(f"{level} {mine.at(level)}" for level in shared)
        return f"no machine is outside {named}"
    return "no machine is outside its rack, switch and power domain at once"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


# --------------------------------------------------------------------------- what it is worth


def survives(places: Mapping[str, tuple[str, ...]], lost: frozenset[str]) -> bool:
    """Whether every lost owner has a copy on a machine that is left."""
    return all(
        any(holder not in lost for holder in places[owner]) for owner in lost if owner in places
    )


def fatal_domains(
    places: Mapping[str, tuple[str, ...]], domains: Mapping[str, Domains]
) -> tuple[tuple[Level, str], ...]:
    """Domains whose loss as a whole can't be survived from memory."""
    return tuple(
        key
        for key, machines in members_by_domain(domains).items()
        if not survives(places, frozenset(machines))
    )


def recoverability(places: Mapping[str, tuple[str, ...]], losses: int) -> float:
    """Probability that `losses` machines, lost at random at once, leave a copy of everything.

    Counted where there are few enough sets of them, else the lower bound for groups of copies.
    """
    machines = sorted({*places, *(name for held in places.values() for name in held)})
    count = len(machines)
    if losses <= 0 or not count:
        return 1.0
    losses = min(losses, count)
    if comb(count, losses) <= ENUMERATED:
        good = sum(survives(places, frozenset(lost)) for lost in combinations(machines, losses))
        return good / comb(count, losses)
    replicas = 1 + min(len(held) for held in places.values())
    return recoverability_bound(count, replicas, losses)


def recoverability_bound(machines: int, replicas: int, losses: int) -> float:
    """Lower bound for groups of `replicas` machines that hold each other's state."""
    if losses < replicas:
        return 1.0
    hurt = machines / replicas * comb(machines - replicas, losses - replicas)
    return max(0.0, 1.0 - hurt / comb(machines, losses))
