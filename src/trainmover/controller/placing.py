"""Where copies of snapshots go, as orders to agents, and what the placement is worth.

Decides nothing of its own: the topology room chooses places, here its answer becomes messages and
figures for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainmover.controller import lookup
from trainmover.controller.kept import Store
from trainmover.controller.state import State
from trainmover.protocol.messages import BackupOrder, BackupPlace, PlaceBackups
from trainmover.topology.domains import Domains, domains_of
from trainmover.topology.placement import Placement, fatal_domains, place, recoverability

LOSSES: Final = (1, 2, 3)
"""Machines lost at once for which the chance to recover from memory is told."""


def domains(state: State) -> dict[str, Domains]:
    """Fault domains as the machines' labels say."""
    return {name: domains_of(name, state.machines[name].labels) for name in sorted(state.machines)}


def choose(state: State, stores: Mapping[str, Store]) -> Placement:
    """Places for the copies of every machine with ranks; little is moved."""
    holders = [m.name for m in lookup.usable_machines(state) if m.name in stores]
    owners = state.membership.machines() if state.membership is not None else ()
    kept = state.kept
    return place(owners, holders, domains(state), kept.keeping.snapshot.peers, kept.places)


def orders(
    state: State, places: Mapping[str, tuple[str, ...]], stores: Mapping[str, Store]
) -> dict[str, PlaceBackups]:
    """What each machine with ranks is told."""
    return {owner: _order(state, owner, places[owner], stores) for owner in places}


def _order(
    state: State, owner: str, places: tuple[str, ...], stores: Mapping[str, Store]
) -> PlaceBackups:
    found = tuple(
        BackupPlace(machine=name, host=stores[name].host, port=stores[name].port) for name in places
    )
    ranks = lookup.ranks_on(state.membership, owner)
    ordered = tuple(BackupOrder(rank=rank, places=found) for rank in ranks)
    return PlaceBackups(term=state.term, generation=state.generation, orders=ordered)


def survival(places: Mapping[str, tuple[str, ...]]) -> tuple[float, ...]:
    """For each of `LOSSES` below all machines: the probability that every state has a copy left."""
    machines = {*places, *(name for held in places.values() for name in held)}
    return tuple(recoverability(places, count) for count in LOSSES if count < len(machines))


def fatal(state: State, places: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Domains whose loss as a whole leaves no copy of something, as `rack r1`."""
    return tuple(f"{level} {name}" for level, name in fatal_domains(places, domains(state)))


def worth_text(chances: tuple[float, ...], lethal: tuple[str, ...]) -> str:
    """One line for people; empty before anything was placed."""
    if not chances:
        return ""
    parts = [
        f"{count} machine{'s' if count > 1 else ''} lost at once: {100 * chance:.4g} %"
        for count, chance in zip(LOSSES, chances, strict=False)
    ]
    text = f"copies survive with {', '.join(parts)}"
    return f"{text}; not the loss of {', '.join(lethal[:8])}" if lethal else text


def placement_text(state: State) -> str:
    """What the copies in memory are worth, and what could not be had."""
    kept = state.kept
    return "; ".join(filter(None, (worth_text(kept.survival, kept.fatal), *kept.reasons)))
