"""Steps whose optimizer is given a closure, which it calls once or several times."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from step_bench import STEPS, Bench, loss_of  # beside this script, wherever it is run from
from torch import nn


def with_closure(
    bench: Bench, optimizer: torch.optim.Optimizer, model: nn.Module, *, is_mean: bool = False
) -> None:
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        losses: list[torch.Tensor] = []

        def closure(step: Any = step, losses: list[torch.Tensor] = losses) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, next(batches))
            loss.backward()
            if not losses:
                step.log(loss=loss)
            losses.append(loss.detach())
            bench.note(loss)
            if is_mean:
                # LBFGS keeps the loss in its state, which must be equal on all ranks.
                loss = loss.detach()
                dist.all_reduce(loss)
            return loss

        with step:
            optimizer.step(closure)  # type: ignore[arg-type]


def closure_adamw(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    with_closure(bench, bench.adam(model.parameters()), model)


def closure_lbfgs(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-2, max_iter=1)
    bench.optimizers.append(optimizer)
    with_closure(bench, optimizer, model, is_mean=True)


def closure_lbfgs_own(bench: Bench) -> None:
    """Each rank's optimizer keeps its own loss, and its updates lie between its closure's calls.
    Its tests on the loss are off: they would let ranks call it unequally often."""
    model = bench.ddp(bench.net())
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1e-2, max_iter=3, tolerance_change=-1.0, tolerance_grad=-1.0
    )
    bench.optimizers.append(optimizer)
    with_closure(bench, optimizer, model)
