"""Small leaves: schedulers, optimizers' plain values, the user's own objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from trainmover.state.inventory import Inventory


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.MultiStepLR(o, [2, 4]),
        lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
        lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: schedulers.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o), schedulers.CosineAnnealingLR(o, 5)], [3]
        ),
        lambda o: schedulers.ChainedScheduler(
            [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.9)]
        ),
    ],
)
def test_every_scheduler_moves(make: Any) -> None:
    def build() -> tuple[Any, Any, Inventory]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        scheduler = make(optimizer)
        return optimizer, scheduler, Inventory({"optimizer": optimizer, "scheduler": scheduler})

    def steps(optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(5):
            optimizer.step()
            is_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
            scheduler.step(1.0) if is_plateau else scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler, inventory = build()
    steps(optimizer, scheduler)
    joiner_optimizer, joiner_scheduler, joiner = build()
    for name in inventory.small_names:
        joiner.load_small(name, inventory.small_bytes(name))
        assert joiner.small_digest(name) == inventory.small_digest(name)
    assert steps(joiner_optimizer, joiner_scheduler) == steps(optimizer, scheduler)


def test_a_learning_rate_tensor_is_loaded_in_place() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1))
    inventory = Inventory({"optimizer": optimizer})
    data, rate = inventory.small_bytes("optimizer.param_groups"), optimizer.param_groups[0]["lr"]
    rate.fill_(3.0)
    inventory.load_small("optimizer.param_groups", data)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


def test_optimizer_state_that_is_not_tensors() -> None:
    def build() -> tuple[nn.Parameter, torch.optim.Optimizer, Inventory]:
        parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
        optimizer = torch.optim.LBFGS([parameter], max_iter=3)
        return parameter, optimizer, Inventory({"optimizer": optimizer})

    def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameter**4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    parameter, optimizer, inventory = build()
    step(parameter, optimizer)
    joiner_parameter, joiner_optimizer, joiner = build()
    joiner.conform(inventory.manifest())
    for (_, here), (_, there) in zip(joiner.bulk(), inventory.bulk(), strict=True):
        here.detach().copy_(there)
    name = "optimizer.param_groups"
    joiner.load_small(name, inventory.small_bytes(name))
    step(parameter, optimizer)
    step(joiner_parameter, joiner_optimizer)
    assert torch.equal(parameter, joiner_parameter)
    assert joiner.small_digest(name) == inventory.small_digest(name)


class Trainer:
    """Contains what is tracked under its own names as well."""

    def __init__(self) -> None:
        self.model = nn.Linear(300, 300)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.steps = state["steps"]


def test_a_trainer_that_contains_the_model() -> None:
    trainer, joiner = Trainer(), Trainer()
    trainer.steps = 5
    there = Inventory({"trainer": trainer, "model": trainer.model})
    here = Inventory({"trainer": joiner, "model": joiner.model})
    assert [name for name, _ in there.bulk()] == ["model.weight", "model.bias"]
    assert len(there.small_bytes("trainer")) < 1000
    weight = joiner.model.weight.detach().clone()
    here.load_small("trainer", there.small_bytes("trainer"))
    assert joiner.steps == 5
    assert torch.equal(joiner.model.weight, weight)


class Large:
    """Hands out its own large tensor."""

    def __init__(self) -> None:
        self.parts = [{"big": torch.zeros(200, 200), "small": torch.zeros(2)}]
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts, self.count = state["parts"], state["count"]


class LargeCopy(Large):
    """Hands out a copy."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


def test_large_live_tensors_of_objects_are_bulk() -> None:
    source = Large()
    inventory = Inventory({"large": source})
    assert [name for name, _ in inventory.bulk()] == ["large.parts.0.big"]
    assert len(inventory.small_bytes("large")) < 1000
    data = inventory.small_bytes("large")
    source.parts[0]["small"].add_(3)
    source.count = 9
    inventory.load_small("large", data)
    assert source.count == 0
    assert source.parts[0]["small"].tolist() == [0, 0]
    assert Inventory({"copy": LargeCopy()}).bulk() == []


def test_bytes_that_are_remembered_are_those_that_would_be_made_anew() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.0)
    known = Inventory({"optimizer": optimizer})
    group = optimizer.param_groups[0]

    def learn() -> None:
        optimizer.state[parameters[0]]["count"] = 1

    changes: list[Any] = [
        lambda: None,
        lambda: group.update(lr=0.2),
        lambda: group.update(lr=0.2 * 1.0),
        lambda: group.update(lr=torch.tensor(0.2)),
        lambda: group["lr"].add_(1.0),  # the very same object, another value
        lambda: group.update(lr=1),
        lambda: group.update(lr=True),
        lambda: group.update(notes=["a"]),
        lambda: group["notes"].append("b"),
        lambda: group.pop("notes"),
        learn,
        optimizer.state.clear,
        lambda: optimizer.add_param_group({"params": parameters[1:], "lr": 0.5}),
    ]
    for change in changes:
        change()
        fresh = Inventory({"optimizer": optimizer})
        for name in known.small_names:
            assert known.small_bytes(name) == fresh.small_bytes(name)
            assert known.small_bytes(name) == fresh.small_bytes(name)
