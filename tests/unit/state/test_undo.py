"""An undone and repeated step is bit for bit the step that was never interrupted."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.state.toy import ROWS, Run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from trainmover.errors import ScriptError
from trainmover.state import undo as undo_module
from trainmover.state.inventory import Inventory
from trainmover.state.rng import capture_rng
from trainmover.state.undo import UndoSet
from trainmover.worker.batches import Batches

STEPS = 8


def undisturbed(**options: bool | int) -> Run:
    run = Run(**options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    for _ in range(STEPS):
        run.step()
    return run


@pytest.mark.parametrize("keeps_gradients", [False, True])
@pytest.mark.parametrize("inf_every", [0, 3])
@pytest.mark.parametrize("attempts", [1, 2])
def test_toy_step(keeps_gradients: bool, inf_every: int, attempts: int) -> None:
    options = {"keeps_gradients": keeps_gradients, "inf_every": inf_every}
    expected = undisturbed(**options)
    run = Run(**options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    for _ in range(STEPS):
        run.undo.capture()
        boundary, state = capture_rng(), run.everything()
        for _ in range(attempts):
            run.before_gate()
            assert run.undo.changed_bulk() == []
            run.undo.restore()
            assert capture_rng() == boundary
            assert run.everything() == state
        run.step()
    assert repr(run.losses) == repr(expected.losses)  # nan equals nan
    assert run.everything() == expected.everything()
    assert run.best.value == expected.best.value


def test_half_a_step_is_undone_too() -> None:
    expected = undisturbed(micro_steps=1)
    run = Run(micro_steps=1)
    torch.manual_seed(1)
    for _ in range(STEPS):
        run.undo.capture()
        words = torch.randint(50, (ROWS, 4))
        run.scaler.scale(run.model(words).sum()).backward()
        run.undo.restore()
        run.step()
    assert run.losses == expected.losses
    assert run.everything() == expected.everything()


def test_gradients_as_they_were() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(3)])
    absent, zero, kept = model
    zero.grad, kept.grad = torch.zeros(3), torch.tensor([1.0, -0.0, float("nan")])
    zero_object, kept_object = zero.grad, kept.grad
    undo = UndoSet(Inventory({"model": model}), [])
    undo.capture()
    sum((p * 2).sum() for p in model).backward()  # type: ignore[union-attr]
    zero.grad = None
    undo.restore()
    assert absent.grad is None
    assert zero.grad is zero_object
    assert zero.grad.tolist() == [0, 0, 0]
    assert kept.grad is kept_object
    assert repr(kept.grad.tolist()) == "[1.0, -0.0, nan]"


def test_buffers_keep_their_identity_or_get_it_back() -> None:
    run = Run()
    mean, table = run.model.norm.running_mean, run.model.table
    run.undo.capture()
    run.model.norm.running_mean.add_(1)
    run.model.table = torch.zeros(9)
    run.undo.restore()
    assert run.model.norm.running_mean is mean
    assert mean.tolist() == [0.0] * 16
    assert run.model.table is table
    assert table.tolist() == [0, 1, 2, 3]


class Big(nn.Module):
    """A large constant buffer beside a small one that changes, and one written behind torch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(600, 600))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("hidden", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(1))

    def work(self) -> None:
        self.seen.add_(1)
        self.hidden.data.add_(1)


def test_large_buffers_that_never_change_are_not_kept() -> None:
    model = Big()
    undo = UndoSet(Inventory({"model": model}), [])
    for _ in range(undo_module.WATCHED_CAPTURES + 2):
        undo.capture()
        model.work()
    undo.capture()
    assert sorted(undo._buffers._images) == ["model.hidden", "model.seen"]
    before = (model.seen.tolist(), model.hidden.tolist())
    model.work()
    undo.restore()
    assert (model.seen.tolist(), model.hidden.tolist()) == before


def test_a_large_buffer_that_changes_late_is_named() -> None:
    model = Big()
    undo = UndoSet(Inventory({"model": model}), [])
    for _ in range(undo_module.WATCHED_CAPTURES + 2):
        undo.capture()
    model.mask.add_(1)
    with pytest.raises(ScriptError, match=r"buffer model.mask changed in this step"):
        undo.restore()
    undo.capture()  # known from now on
    model.mask.add_(1)
    undo.restore()
    assert model.mask[0, 0].item() == 2


def test_scaler_stages_are_put_back() -> None:
    run = Run()
    run.undo.capture()
    run.before_gate()
    assert run.scaler._per_optimizer_states
    run.undo.restore()
    assert not run.scaler._per_optimizer_states
    run.before_gate()
    run.scaler.step(run.optimizer)
    stages = copy.deepcopy(dict(run.scaler._per_optimizer_states))
    run.undo.capture()  # a script that updates its scaler later
    run.scaler.update()
    run.undo.restore()
    assert repr(dict(run.scaler._per_optimizer_states)) == repr(stages)


def test_writes_to_bulk_are_named() -> None:
    run = Run()
    torch.manual_seed(1)
    run.undo.capture()
    assert run.undo.changed_bulk() == []
    run.step()
    changed = run.undo.changed_bulk()
    assert "model.hidden.weight" in changed
    assert "optimizer.state[model.hidden.weight].exp_avg" in changed
    run.undo.capture()
    run.optimizer.state[run.model.hidden.weight]["exp_avg"].add_(1)
    assert run.undo.changed_bulk() == ["optimizer.state[model.hidden.weight].exp_avg"]


def test_replaced_and_dropped_bulk_is_named() -> None:
    run = Run()
    run.step()
    run.undo.capture()
    state = run.optimizer.state[run.model.hidden.bias]
    state["exp_avg"] = state["exp_avg"].clone()
    assert run.undo.changed_bulk() == ["optimizer.state[model.hidden.bias].exp_avg"]
    run.undo.capture()
    run.optimizer.state.clear()
    assert run.undo.changed_bulk() == ["optimizer state that is gone now"]


def test_sharded_parameters() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        undo = UndoSet(Inventory({"model": model, "optimizer": optimizer}), [])
        for _ in range(3):
            undo.capture()
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
                assert undo.changed_bulk() == []
                undo.restore()
                assert all(parameter.grad is None for parameter in model.parameters())
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            assert undo.changed_bulk()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def test_batches_are_rewound() -> None:
    batches = Batches(lambda: torch.rand(2))
    undo = UndoSet(Run().inventory, [batches])
    undo.capture()
    first, noise = next(batches), torch.rand(1)
    undo.restore()
    assert next(batches) is first
    assert torch.equal(torch.rand(1), noise)


def test_two_optimizers_and_plain_values() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = torch.optim.SGD(one.parameters(), 0.1), torch.optim.Adam(two.parameters())
    inventory = Inventory({"one": one, "two": two, "optimizers": [first, second]})
    undo = UndoSet(inventory, [])
    undo.capture()
    second.param_groups[0]["lr"] = 7.0
    undo.restore()
    assert second.param_groups[0]["lr"] == 1e-3


class Touched(TorchDispatchMode):
    """Most elements that one operation has read or written."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = fn(*args, **(kwargs or {}))
        for one in (found, *args):
            if isinstance(one, torch.Tensor):
                self.most = max(self.most, one.numel())
        return found


def test_capture_is_cheap() -> None:
    """The target is 0.3 ms; counted, not timed: no parameter is touched, and no more is done in
    Python than for the small leaves."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(24)), nn.BatchNorm1d(256))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    inventory = Inventory({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    undo = UndoSet(inventory, [])
    for _ in range(5):
        undo.capture()
    with Touched() as touched:
        undo.capture()
    assert touched.most < 256 * 256
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        undo.capture()
    finally:
        sys.setprofile(None)
    assert entered < 2000
