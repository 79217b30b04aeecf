"""Batches of callables: undo, prefetch and position."""

from __future__ import annotations

import pytest
import torch
from tests.unit.worker.loader_kinds import get_batch, seed_all, step

from trainmover.state.rng import capture_rng, restore_rng
from trainmover.worker.batches import Batches


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_callable_on_the_global_generators_is_exact(prefetch: int) -> None:
    def fresh() -> Batches:
        return Batches(get_batch, prefetch=prefetch)

    plain = fresh()
    seed_all(7)
    expected = [step(plain) for _ in range(8)]

    undone = fresh()
    seed_all(7)
    seen = []
    for _ in range(8):
        undone.begin_attempt()
        boundary = capture_rng()
        torch.rand(2)
        step(undone)
        undone.rewind()
        restore_rng(boundary)
        seen.append(step(undone))
    assert seen == expected

    for place in range(8):
        leaver = fresh()
        seed_all(7)
        seen = [step(leaver) for _ in range(place)]
        position, boundary = leaver.position(), capture_rng()
        joiner = fresh()
        step(joiner)
        restore_rng(boundary)
        joiner.restore(position)
        assert capture_rng() == boundary
        assert joiner.handed_out == place
        assert seen + [step(joiner) for _ in range(8 - place)] == expected


class Reader:
    """A callable with state of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __call__(self) -> torch.Tensor:
        self.place += 1
        return torch.tensor([self.place])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_callable_with_state_of_its_own(prefetch: int) -> None:
    leaver = Batches(Reader(), prefetch=prefetch)
    assert [next(leaver).item() for _ in range(3)] == [1, 2, 3]
    leaver.begin_attempt()
    next(leaver)
    leaver.rewind()
    joiner = Batches(Reader(), prefetch=prefetch)
    joiner.restore(leaver.position())
    assert [next(leaver).item() for _ in range(4)] == [4, 5, 6, 7]
    assert [next(joiner).item() for _ in range(4)] == [4, 5, 6, 7]
