"""Dissemination of gate flags, over a made-up network."""

from __future__ import annotations

import random

import pytest

from trainmover.communicator.gate import GateMismatch, GateResult, Gates, GateSend
from trainmover.errors import LocalProtocolError


def play(size: int, seed: int, absent: int | None = None) -> dict[int, tuple[int, ...]]:
    generator = random.Random(seed)
    gates = [Gates(rank, size) for rank in range(size)]
    todo = [("enter", rank, None) for rank in range(size) if rank != absent]
    results: dict[int, tuple[int, ...]] = {}
    while todo:
        kind, rank, send = todo.pop(generator.randrange(len(todo)))
        if kind == "enter":
            outcomes = gates[rank].contribute(7, 1, (rank, -rank))
        else:
            assert send is not None
            outcomes = gates[rank].arrive(send.step, send.kind, send.round, send.flags)
        for outcome in outcomes:
            if isinstance(outcome, GateSend):
                todo.append(("arrive", outcome.to_rank, outcome))
            else:
                assert isinstance(outcome, GateResult) and rank not in results
                results[rank] = outcome.flags
    return results


@pytest.mark.parametrize("size", range(1, 10))
def test_everybody_gets_the_maximum_in_any_order(size: int) -> None:
    for seed in range(20):
        assert play(size, seed) == dict.fromkeys(range(size), (size - 1, 0))


@pytest.mark.parametrize("size", range(2, 9))
def test_nobody_passes_without_everybody(size: int) -> None:
    for absent in range(size):
        assert play(size, absent, absent) == {}


def test_once_per_step_and_closed_gates_stay_silent() -> None:
    gates = Gates(0, 2)
    gates.contribute(1, 1, (0,))
    with pytest.raises(LocalProtocolError):
        gates.contribute(1, 1, (0,))
    gates.close()
    assert gates.arrive(1, 1, 0, (5,)) == []


def test_another_kind_is_named() -> None:
    gates = Gates(0, 2)
    gates.contribute(1, 1, (0,))
    (outcome,) = gates.arrive(1, 2, 0, (5,))
    assert isinstance(outcome, GateMismatch) and "rank 1" in outcome.detail


def test_an_entered_gate_says_whose_frame_is_missing() -> None:
    gates = Gates(0, 3)
    assert gates.awaited() is None
    gates.contribute(4, 0, (1,))
    assert gates.awaited() == (4, 2)
    gates.arrive(4, 0, 0, (1,))
    assert gates.awaited() == (4, 1)
    gates.arrive(4, 0, 1, (1,))
    assert gates.awaited() is None
    gates.contribute(5, 0, (1,))
    gates.close()
    assert gates.awaited() is None
