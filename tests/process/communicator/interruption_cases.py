"""An interruption at every collective of a step, run out, undone and repeated."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainmover.communicator import Mode
from trainmover.communicator.settings import CollectiveCall

from .fleet import Rank

STEPS = 3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(3)],
            torch.nn.Dropout(0.1),
            torch.nn.Linear(48, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def build(kind: str, size: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model = Net()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.005)
    shape, names = ((size,), ("shard",)) if kind == "fsdp" else ((2, size // 2), ("rep", "shard"))
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Trainer:
    """A step that can be interrupted at its n-th collective."""

    first = 0
    """First step to interrupt."""

    def __init__(self, rank: Rank, kind: str) -> None:
        self.rank = rank
        self.model = self.build(kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.calls = 0
        self.stop_at: int | None = None
        self.is_after_entry = False
        self.generation = rank.communicator.generation
        rank.communicator.observer = self._entered

    def build(self, kind: str) -> torch.nn.Module:
        return build(kind, self.rank.size)

    def _entered(self, call: CollectiveCall) -> None:
        self.calls += 1
        if self.stop_at == self.calls:
            if self.is_after_entry:  # the work is outstanding when the break comes
                now = self.generation
                self.rank.engine.call_later(0.003, lambda: self._break_if(now))
            else:
                self._break()

    def _break_if(self, generation: int) -> None:
        """Late, but not so late that it hits the repeated step."""
        if self.rank.communicator.generation == generation == self.generation:
            self._break()

    def _break(self) -> None:
        self.rank.communicator.break_generation("test")

    def gradients(self, step: int) -> float:
        torch.manual_seed(1000 * step + self.rank.index)
        loss = self.model(torch.randn(8, 48)).square().mean()
        loss.backward()
        return loss.item()

    def step(self, step: int) -> None:
        self.calls = 0
        self.gradients(step)
        self._apply()

    def _apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def interrupted_step(self, step: int, stop_at: int, late: bool) -> bool:
        """True where the interruption came before the step's gradients were complete."""
        communicator = self.rank.communicator
        # What the gate does in a job: nobody is in this step before all have left the last one.
        # Without it a rank that breaks here would cut short the step behind it on a slower rank.
        dist.barrier()
        self.calls, self.stop_at, self.is_after_entry = 0, stop_at, late
        self.gradients(step)
        self.stop_at = None
        if communicator.mode is not Mode.RUN_OUT:
            self.rank.events.wait("poisoned", self.generation) if not late else None
            communicator.break_generation("test")
        assert communicator.tainted
        self.optimizer.zero_grad()
        self.generation += 1
        self.rank.enter(self.generation)
        communicator.clear_taint()
        return True

    def digest(self) -> str:
        total = hashlib.blake2b()
        for parameter in self.model.parameters():
            total.update(local(parameter.detach()).contiguous().numpy().tobytes())
            state = self.optimizer.state.get(parameter, {})
            for name in sorted(state):
                total.update(local(state[name]).contiguous().numpy().tobytes())
        return total.hexdigest()


def undisturbed(rank: Rank, kind: str) -> Any:
    rank.init()
    trainer = Trainer(rank, kind)
    calls = []
    for step in range(STEPS):
        trainer.step(step)
        calls.append(trainer.calls)
    return trainer.digest(), calls


def interrupted(rank: Rank, kind: str, points: list[tuple[int, int, bool]]) -> Any:
    """One training per (step, collective, late), all in one process."""
    rank.init()
    digests = []
    for stop_step, stop_at, late in points:
        trainer = Trainer(rank, kind)
        for step in range(STEPS):
            if step == stop_step:
                trainer.interrupted_step(step, stop_at, late)
            trainer.step(step)
        digests.append(trainer.digest())
        del trainer
    return digests


def tensors(rank: Rank) -> Any:
    """Outstanding works of every kind end at once with valid values."""
    rank.init()
    if rank.index != 0:  # never comes
        rank.sync("broken")
        rank.enter(2)
        value = torch.ones(5)
        dist.all_reduce(value)
        return value.tolist()
    fresh = torch.full((300_000,), float("nan"))
    n = rank.size
    results = {
        "all_reduce": torch.full((300_000,), 2.0),
        "small": torch.full((10,), 2.0),
        "gather": torch.full((n * 1000,), float("nan")),
        "scatter": torch.full((1000,), float("nan")),
        "recv": torch.full((1000,), float("nan")),
        "any": torch.full((1000,), float("nan")),
    }
    works = [
        dist.all_reduce(results["all_reduce"], async_op=True),
        dist.all_reduce(results["small"], async_op=True),
        dist.broadcast(fresh, 1, async_op=True),
        dist.all_gather_single(results["gather"], torch.full((1000,), 7.0), async_op=True),
        dist.reduce_scatter_single(results["scatter"], torch.full((n * 1000,), 5.0), async_op=True),
        dist.irecv(results["recv"], 1),
        dist.isend(torch.ones(3_000_000), 1),
        dist.barrier(async_op=True),
    ]
    announced: list[bool] = []
    rank.communicator.on_invented = lambda: announced.append(works[-1].is_completed())
    rank.communicator.break_generation("test")
    assert announced == [False], "once, in front of the first value"
    for work in works:
        work.wait()
    assert (results["small"] == 2).all()
    for name, value in (("gather", 7.0), ("scatter", 5.0), ("recv", 0.0)):
        assert (results[name] == value).all(), name
    assert torch.isfinite(results["all_reduce"]).all()
    kept = [results[name].clone() for name in results]
    # The caller found nothing broken a moment ago: it is told in front of the value all the same.
    rank.communicator.on_invented = announced.clear
    rank.communicator.observer = lambda call: announced.append(True)
    dist.all_reduce(torch.ones(3))
    rank.communicator.observer = None
    assert announced == []
    assert dist.recv(results["any"]) >= 0 and (results["any"] == 0).all()
    kept[-1].zero_()
    rank.sync("broken")
    rank.enter(2)
    value = torch.ones(5)
    dist.all_reduce(value)
    for name, before in zip(results, kept, strict=True):  # nothing late was written
        assert torch.equal(results[name], before), name
    return value.tolist()


def deep_copy_free(rank: Rank) -> None:
    rank.init()
    assert copy.copy(dist.group.WORLD) is not None
