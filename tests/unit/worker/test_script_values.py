"""Values that a script sets once, and a checkpoint of a run that set others (C65)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from trainmover.errors import StateMismatch
from trainmover.state.inventory import Inventory
from trainmover.worker.script_values import name_differences, values_of

Make = Callable[[torch.optim.Optimizer, int], Any]


def chained(optimizer: torch.optim.Optimizer, total: int) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])


SCHEDULES: dict[str, Make] = {
    "cosine": lambda optimizer, total: lr_scheduler.CosineAnnealingLR(optimizer, T_max=total),
    "onecycle": lambda optimizer, total: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=total
    ),
    "chained": chained,
    "milestones": lambda optimizer, total: lr_scheduler.MultiStepLR(optimizer, [2, total]),
    "lambda": lambda optimizer, total: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "plateau": lambda optimizer, total: lr_scheduler.ReduceLROnPlateau(optimizer, patience=total),
}


def built(make: Make | None, total: int = 40, **options: Any) -> Inventory:
    model = nn.Linear(3, 2)
    settings = {"lr": 0.1, "momentum": 0.9, **options}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    tracked: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if make is not None:
        tracked["gamma"] = make(optimizer, total)
    return Inventory(tracked)


def run(inventory: Inventory, steps: int) -> None:
    for _ in range(steps):
        for parameter in inventory.models[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        inventory.optimizers[0].step()
        for schedule in inventory.schedulers:
            plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
            schedule.step(*((1.0,) if plateau else ()))


def restore(source: Inventory, target: Inventory) -> None:
    target.conform(source.manifest())
    for name in source.small_names:
        target.load_small(name, source.small_bytes(name))


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_runs_on_by_itself_is_no_difference(kind: str) -> None:
    source, target = built(SCHEDULES[kind]), built(SCHEDULES[kind])
    run(source, 7)
    here = values_of(target)
    restore(source, target)
    assert not name_differences(here, values_of(target), is_strict=True)


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("cosine", "gamma.T_max"),
        ("onecycle", "gamma.total_steps"),
        ("chained", "gamma._schedulers.1.T_max"),
        ("milestones", "gamma.milestones"),
        ("plateau", "gamma.patience"),
    ],
)
def test_c65_another_length_is_named_and_the_saved_one_goes_on(kind: str, word: str) -> None:
    source, target = built(SCHEDULES[kind]), built(SCHEDULES[kind], total=60)
    run(source, 7)
    here = values_of(target)
    restore(source, target)
    there = values_of(target)
    text = name_differences(here, there, is_strict=False)
    assert f"{word} is {there[word]} there and {here[word]} here" in text
    with pytest.raises(StateMismatch, match=word):
        name_differences(here, there, is_strict=True)
    for _ in range(6):
        run(source, 1)
        run(target, 1)
        rates = [each.optimizers[0].param_groups[0]["lr"] for each in (source, target)]
        assert rates[0] == rates[1]


def test_options_of_an_optimizer_are_named_and_never_refused() -> None:
    source, target = built(None), built(None, lr=0.2, weight_decay=0.01)
    run(source, 2)
    here = values_of(target)
    restore(source, target)
    text = name_differences(here, values_of(target), is_strict=True)
    assert "optimizer.0.lr is 0.1 there and 0.2 here" in text
    assert "optimizer.0.weight_decay is 0 there and 0.01 here" in text
    assert "momentum" not in text
