"""Ranks that hold different parts of one model, and optimizers that wrap others."""

from __future__ import annotations

import torch
from torch import nn

from trainmover.state.inventory import Inventory


class Wrapper(torch.optim.Optimizer):
    """As ZeRO: groups of its own that overwrite those of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.5})
        self.optim = inner


def wrapped() -> tuple[Inventory, Wrapper]:
    model = nn.Linear(2, 2)
    outer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    return Inventory({"model": model, "optimizer": outer}), outer


def test_a_wrappers_own_groups_are_state() -> None:
    there, outer = wrapped()
    outer.param_groups[0]["lr"] = 0.25
    here, mine = wrapped()
    for name in there.small_names:
        here.load_small(name, there.small_bytes(name))
    assert mine.param_groups[0]["lr"] == 0.25
    assert mine.optim.param_groups[0]["lr"] == 0.1


def test_stages_of_other_classes_show_the_same_names() -> None:
    plain, normed = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    one, other = (Inventory({"model": stage}) for stage in (plain, normed))
    assert one.names == other.names
    assert one.small_names == other.small_names


def test_values_tell_ranks_of_equal_names_apart() -> None:
    def built(seed: int) -> Inventory:
        torch.manual_seed(seed)
        return Inventory({"model": nn.Linear(2, 2)})

    first, same, other = built(0), built(0), built(1)
    assert first.identity == other.identity, "names and shapes alone say nothing"
    for inventory in (first, same, other):
        inventory.tell_apart(inventory.parameter_digest())
    assert first.identity == same.identity != other.identity


def test_a_joiner_takes_the_identity_of_its_source() -> None:
    source, joiner = Inventory({"model": nn.Linear(2, 2)}), Inventory({"model": nn.Linear(2, 2)})
    source.tell_apart(17)
    joiner.conform(source.manifest())
    assert joiner.identity == source.identity
