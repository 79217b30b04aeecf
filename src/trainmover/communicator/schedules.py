"""Arithmetic of the collectives: who exchanges which part with whom, in which order.

Decides the reduction tree, and with it the numbers: for p = the largest power of two <= n,
ranks r >= p fold into r - p; then partners at distance p/2, p/4, ..., 1 combine. It depends on
the number of ranks only, never on size, position, chunking, algorithm or transport, so DDP may
rebuild its buckets without changing a bit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


def power_below(count: int) -> int:
    """Largest power of two <= `count` (which is at least 1)."""
    return 1 << (count.bit_length() - 1)


def distances(count: int) -> tuple[int, ...]:
    """Partner distances of the core of `count` ranks, in the order of reduction."""
    result = []
    distance = power_below(count) // 2
    while distance:
        result.append(distance)
        distance //= 2
    return tuple(result)


def hypercube_partners(rank: int, count: int) -> tuple[int, ...]:
    """Ranks that `rank` exchanges data with in reductions and gathers, ascending."""
    core = power_below(count)
    if rank >= core:
        return (rank - core,)
    partners = [rank ^ distance for distance in distances(count)]
    if rank + core < count:
        partners.append(rank + core)
    return tuple(sorted(partners))


class Exchange(NamedTuple):
    """One round of recursive halving: what this rank keeps and what it gives away."""

    partner: int
    keep: tuple[int, int]
    give: tuple[int, int]


def halving(rank: int, core: int, total: int) -> tuple[Exchange, ...]:
    """Rounds of recursive halving of `total` elements among `core` ranks (a power of two)."""
    rounds = []
    low, high = 0, total
    distance = core // 2
    while distance:
        middle = low + (high - low) // 2
        lower, upper = (low, middle), (middle, high)
        partner = rank ^ distance
        keep, give = (lower, upper) if rank < partner else (upper, lower)
        rounds.append(Exchange(partner, keep, give))
        low, high = keep
        distance //= 2
    return tuple(rounds)


class BlockExchange(NamedTuple):
    """One round over blocks: indices of blocks kept and given away, in ascending order."""

    partner: int
    keep: tuple[int, ...]
    give: tuple[int, ...]


def block_halving(rank: int, count: int) -> tuple[BlockExchange, ...]:
    """Recursive halving where block i must end at rank i, for any number of ranks.

    Core rank r is responsible for block r and, where it exists, block r + core (of the rank that
    folded into it).
    """
    core = power_below(count)
    rounds = []
    low, high = 0, core
    for distance in distances(count):
        middle = low + (high - low) // 2
        halves = ((low, middle), (middle, high))
        partner = rank ^ distance
        kept, given = halves if rank < partner else halves[::-1]
        rounds.append(
            BlockExchange(partner, _blocks(kept, core, count), _blocks(given, core, count))
        )
        low, high = kept
    return tuple(rounds)


def _blocks(owners: tuple[int, int], core: int, count: int) -> tuple[int, ...]:
    first = range(*owners)
    second = (owner + core for owner in first if owner + core < count)
    return (*first, *second)


def chunks(low: int, high: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut [low, high) into pieces of at most `size`."""
    for start in range(low, high, size):
        yield start, min(start + size, high)


class TreePlace(NamedTuple):
    """A rank's place in a broadcast tree: where data comes from and where it goes, in order."""

    parent: int | None
    children: tuple[int, ...]


def tree_place(rank: int, root: int, count: int) -> TreePlace:
    """Broadcast tree that uses the core's channels only, whatever the root."""
    core = power_below(count)
    if rank >= core:
        if rank == root:
            return TreePlace(None, (rank - core,))
        return TreePlace(rank - core, ())
    core_root = root if root < core else root - core
    place = rank ^ core_root
    parent: int | None = None
    if place:
        parent = (place & (place - 1)) ^ core_root
    elif root >= core:
        parent = root
    limit = (place & -place) if place else core
    children = []
    distance = limit // 2
    while distance:
        children.append((place | distance) ^ core_root)
        distance //= 2
    if rank + core < count and rank + core != root:
        children.append(rank + core)
    return TreePlace(parent, tuple(children))
