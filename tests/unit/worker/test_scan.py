"""Live objects that nothing tracks are found, and nothing else is."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from trainmover.worker.batches import Batches
from trainmover.worker.scan import Finding, find_untracked


@pytest.fixture(autouse=True)
def only_this_test() -> Any:
    """Objects of other tests in this process are known beforehand."""
    gc.collect()


@pytest.fixture
def before() -> list[object]:
    found = find_untracked([])
    assert all(isinstance(one, Finding) for one in found)
    kinds = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    others = (torch.amp.GradScaler, DataLoader)
    return [item for item in gc.get_objects() if issubclass(type(item), kinds + others)]


def summary(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(one.kind, one.type_name, one.name) for one in findings]


def test_everything_tracked(before: list[object]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [linear, torch.optim.lr_scheduler.ConstantLR(optimizer)], [3]
    )
    loss, scaler = nn.CrossEntropyLoss(), torch.amp.GradScaler("cpu", enabled=False)
    batches = Batches(DataLoader([1, 2]))
    tracked = [model, optimizer, scheduler, batches]
    assert summary(find_untracked([*tracked, *before])) == []
    del loss, scaler, linear


def test_each_kind_is_found_with_its_name(before: list[object]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu")
    reader = DataLoader([1, 2])
    found = find_untracked([model, *before])
    assert summary(found) == [
        ("loader", "DataLoader", "reader"),
        ("module", "AveragedModel", "average"),
        ("optimizer", "SGD", "optimizer"),
        ("scaler", "GradScaler", "scaler"),
        ("scheduler", "StepLR", "schedule"),
    ]
    assert all(one.file == __file__ and one.line for one in found)
    assert (
        summary(find_untracked([model], [average, optimizer, schedule, scaler, reader, *before]))
        == []
    )


def test_the_message(before: list[object]) -> None:
    ema = nn.Linear(1000, 1100, bias=False)
    (finding,) = find_untracked([], before)
    assert finding.message == (
        f"found but not tracked: Linear 'ema' (1.1 M parameters, test_scan.py:{finding.line}). "
        "track(ema=...) or track(..., ignore=[ema])"
    )
    source = Path(__file__).read_text().splitlines()[finding.line - 1]
    assert "ema = nn.Linear(1000" in source
    del ema


def test_wrappers_and_parts_of_tracked_modules_are_not_found(before: list[object]) -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    compiled = torch.compile(outer, backend="eager")
    assert find_untracked([outer, *before]) == []
    assert find_untracked([inner, *before]) == []
    assert find_untracked([compiled, *before]) == []


def test_only_the_outermost_is_named(before: list[object]) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert summary(find_untracked(before)) == [("module", "Sequential", "model")]
    del model


class Trainer:
    """Holds objects as attributes."""

    def __init__(self) -> None:
        self.shadow = nn.Linear(2, 2)


def test_attributes(before: list[object]) -> None:
    trainer = Trainer()
    (finding,) = find_untracked(before)
    assert finding.name == "trainer.shadow"
    assert "track(shadow=...)" in finding.message
    assert find_untracked([trainer, *before]) == []


def test_garbage_is_not_found(before: list[object]) -> None:
    model: Any = nn.Linear(2, 2)
    model.me = [model]
    del model
    assert find_untracked(before) == []


def test_it_is_quick(before: list[object]) -> None:
    """Of an object that is none of its kinds only the type is looked at: no function is entered."""
    find_untracked(before)
    without = functions_entered(before)
    ballast = [[index] for index in range(300_000)]
    assert functions_entered(before) < without + 1000
    del ballast


def functions_entered(before: list[object]) -> int:
    """Counted, not timed: a busy machine must not fail it."""
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        find_untracked(before)
    finally:
        sys.setprofile(None)
    return entered
