"""Interruption under parallelism other than plain data: tensors, pipelines, compiled functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from .fleet import Rank
from .interruption_cases import STEPS, Trainer

WIDTH = 32


class Gathering(torch.nn.Module):
    """Functional collectives inside of what is compiled, with a gradient through them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        everyone = functional.all_gather_tensor_autograd(hidden, 0, dist.group.WORLD)
        mean = functional.all_reduce(everyone.detach(), "avg", dist.group.WORLD)
        return self.second(everyone - mean.mean())


def compiled(size: int) -> torch.nn.Module:
    return torch.compile(Gathering(), backend="eager")


def tensor_parallel(size: int) -> torch.nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    model = torch.nn.Sequential(
        torch.nn.Linear(48, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 8)
    )
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


class Piped(Trainer):
    """1F1B over sends and receives, which torch gives out in batches."""

    MICROBATCHES = 4
    first = 1
    """In step 0 torch exchanges pickled shapes: an invented message is none, unpickling raises, and
    a worker that raises while it runs out is replaced in place (that is the worker's)."""

    def build(self, kind: str) -> torch.nn.Module:
        index, size = self.rank.index, self.rank.size
        torch.manual_seed(index)
        wide = torch.empty(8 // self.MICROBATCHES, 48, requires_grad=True)
        stage_model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh())
        stage = PipelineStage(
            stage_model, index, size, torch.device("cpu"), input_args=(wide,), output_args=(wide,)
        )
        self.schedule = Schedule1F1B(
            stage, self.MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean()
        )
        return stage_model

    def gradients(self, step: int) -> float:
        torch.manual_seed(1000 * step)
        inputs, target = torch.randn(8, 48), torch.randn(8, 48)
        is_last = self.rank.index == self.rank.size - 1
        self.schedule.step(
            *(inputs,) if self.rank.index == 0 else (), target=target if is_last else None
        )
        return 0.0


class Sharing(Trainer):
    """Tensor parallel: every rank has the same input."""

    def build(self, kind: str) -> torch.nn.Module:
        torch.manual_seed(0)
        return tensor_parallel(self.rank.size)

    def gradients(self, step: int) -> float:
        torch.manual_seed(1000 * step)
        loss = self.model(torch.randn(8, 48)).square().mean()
        loss.backward()
        return loss.item()


class Compiling(Trainer):
    """Functional collectives in a compiled module."""

    def build(self, kind: str) -> torch.nn.Module:
        torch.manual_seed(0)
        return compiled(self.rank.size)


KINDS = {"pipeline": Piped, "tensor": Sharing, "compiled": Compiling}


def every_point(rank: Rank, kind: str, stride: int) -> Any:
    """Reference and all interruptions in one fleet: (calls per step, points, those that differ).

    Ranks of a pipeline have unequal numbers of calls: the interruption comes at one rank's n-th,
    the others learn of it by poison.
    """
    rank.init()
    trainer = KINDS[kind](rank, kind)
    calls = []
    for step in range(STEPS):
        trainer.step(step)
        calls.append(trainer.calls)
    wanted = trainer.digest()
    rank.board[f"calls{rank.index}"] = calls
    rank.sync("calls")
    fewest = [
        min(counts)
        for counts in zip(*(rank.board[f"calls{i}"] for i in range(rank.size)), strict=True)
    ]
    first = KINDS[kind].first
    points = [(step, at) for step in range(first, STEPS) for at in range(1, fewest[step] + 1)][
        ::stride
    ]
    wrong = []
    for number, (stop_step, stop_at) in enumerate(points):
        trainer = KINDS[kind](rank, kind)
        for step in range(STEPS):
            if step == stop_step:
                trainer.interrupted_step(step, stop_at, number % 2 == 1)
            trainer.step(step)
        if trainer.digest() != wanted:
            wrong.append((stop_step, stop_at))
    return calls, len(points), wrong
