"""The copy of what a rank had in front of a gate: put back bit for bit, in its own memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from trainmover.protocol.messages import Version
from trainmover.state.inventory import Inventory
from trainmover.state.undo import UndoSet
from trainmover.state.value import Value
from trainmover.worker.tail import Tail
from trainmover.worker.tail_copy import TailCopy


class Place:
    """What the copy sees of a stepper."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.count = Value(0)
        self.inventory = Inventory(
            {"model": self.model, "optimizer": self.optimizer, "s": self.schedule, "c": self.count}
        )
        self.batches: list[Any] = []
        self.version = Version(step=0, lineage=1)
        self.boundary_personal = SimpleNamespace(version=self.version)
        self.undo_set = UndoSet(self.inventory, [])
        self.copy = TailCopy(self)  # type: ignore[arg-type]

    def boundary(self) -> None:
        self.undo_set = self.copy.hand_over(self.undo_set)
        self.undo_set.capture()
        self.boundary_personal = SimpleNamespace(version=self.version)

    def backward(self) -> None:
        self.model(torch.randn(4, 5)).square().mean().backward()

    def update(self) -> None:
        self.copy.capture()
        self.version = Version(step=self.version.step + 1, lineage=1)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.count.value += 1

    def step(self) -> None:
        self.boundary()
        self.backward()
        self.update()

    def bits(self) -> tuple[Any, ...]:
        smalls = tuple(self.inventory.small_bytes(name) for name in self.inventory.small_names)
        names = tuple(name for name, _ in self.inventory.bulk())
        return names, self.inventory.bulk_digest(), smalls


def test_in_the_tail_and_at_the_boundary_behind_it() -> None:
    for is_at_boundary in (False, True):
        place = Place()
        for _ in range(3):
            place.step()
        place.boundary()
        before, generators = place.bits(), torch.get_rng_state()
        place.backward()
        place.update()
        if is_at_boundary:
            place.boundary()
            place.backward()
        assert place.copy.is_in_front_of(place.version)
        place.copy.put_back()
        assert place.bits() == before
        assert torch.equal(torch.get_rng_state(), generators)
        assert all(parameter.grad is None for parameter in place.model.parameters())


def test_back_in_front_of_the_first_update_there_is_no_optimizer_state() -> None:
    place = Place()
    place.boundary()
    before = place.bits()
    place.backward()
    place.update()
    place.copy.put_back()
    assert place.bits() == before
    assert not place.optimizer.state


def test_the_same_memory_serves_every_step() -> None:
    place = Place()
    for _ in range(3):
        place.step()
    images = [image.data_ptr() for image in place.copy._images]
    place.step()
    assert [image.data_ptr() for image in place.copy._images] == images
    place.copy.drop()
    assert place.copy.size_bytes > 0
    assert place.copy._images == []


def tail_of(kind: str = "seen", limit_mb: int = 8192, *, is_joiner: bool = False) -> Tail:
    place: Any = Place()
    config = SimpleNamespace(exact_tail=kind, tail_copy_limit_mb=limit_mb)
    place.host = SimpleNamespace(is_managed=True, config=config, guard_waits=lambda leave: None)
    place.world_size, place.step_index, place.is_shadow = 2, 0, is_joiner
    return Tail(place)


def pass_gate(tail: Tail) -> bool:
    """As if every rank said what this one says. Returns whether a copy is kept."""
    is_kept = tail.wants_copy and not tail.refuses_copy
    tail.passed(SimpleNamespace(is_copy_kept=is_kept))  # type: ignore[arg-type]
    return tail.copy.version is not None


def test_the_first_tail_is_covered_before_anybody_knows_what_it_calls() -> None:
    tail = tail_of()
    stepper: Any = tail._stepper
    assert [pass_gate(tail), pass_gate(tail)] == [True, True]  # two parts, or a repeated step
    stepper.step_index = 1
    assert not pass_gate(tail)
    assert tail.copy._images == []
    tail.has_collectives = True
    assert pass_gate(tail)


def test_who_covers_no_first_tail() -> None:
    joiner = tail_of(is_joiner=True)
    joiner._stepper.is_shadow = False
    for tail in (joiner, tail_of("off"), tail_of(limit_mb=0)):
        assert not pass_gate(tail)
