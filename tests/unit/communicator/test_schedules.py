"""The reduction tree and the trees and rounds built on it, without any socket."""

from __future__ import annotations

import pytest

from trainmover.communicator.schedules import (
    block_halving,
    chunks,
    distances,
    halving,
    hypercube_partners,
    power_below,
    tree_place,
)

SIZES = range(1, 18)


@pytest.mark.parametrize("count", SIZES)
def test_partners_are_symmetric(count: int) -> None:
    for rank in range(count):
        for partner in hypercube_partners(rank, count) if count > 1 else ():
            assert rank in hypercube_partners(partner, count)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("total", [0, 1, 5, 1000])
def test_halving_partitions_among_the_core(count: int, total: int) -> None:
    core = power_below(count)
    ends = []
    for rank in range(core):
        rounds = halving(rank, core, total)
        assert tuple(abs(e.partner - rank) for e in rounds) == distances(count)
        for index, exchange in enumerate(rounds):
            mirrored = halving(exchange.partner, core, total)[index]
            assert (mirrored.keep, mirrored.give) == (exchange.give, exchange.keep)
        ends.append(rounds[-1].keep if rounds else (0, total))
    assert sorted(i for low, high in ends for i in range(low, high)) == list(range(total))


@pytest.mark.parametrize("count", SIZES)
def test_block_halving_leaves_each_block_with_its_rank(count: int) -> None:
    core = power_below(count)
    for rank in range(core):
        rounds = block_halving(rank, count)
        held = set(range(count))
        for index, exchange in enumerate(rounds):
            mirrored = block_halving(exchange.partner, count)[index]
            assert (mirrored.keep, mirrored.give) == (exchange.give, exchange.keep)
            assert held == set(exchange.keep) | set(exchange.give)
            held = set(exchange.keep)
        assert held == {rank, rank + core} & set(range(count))


@pytest.mark.parametrize("count", SIZES)
def test_tree_reaches_everybody_once_over_core_channels(count: int) -> None:
    for root in range(count):
        reached = [root]
        for rank in reached:
            place = tree_place(rank, root, count)
            for child in place.children:
                assert tree_place(child, root, count).parent == rank
                assert child in hypercube_partners(rank, count)
            reached.extend(place.children)
        assert sorted(reached) == list(range(count))
        assert tree_place(root, root, count).parent is None


def test_chunks_cover_a_range() -> None:
    assert list(chunks(3, 10, 4)) == [(3, 7), (7, 10)]
    assert list(chunks(3, 3, 4)) == []
