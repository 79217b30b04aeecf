"""The toy's shape with a loss that is not finite from a step on: on all ranks, or on one."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainmover
from tests.holding import Hold


def factor(step: int, args: argparse.Namespace) -> float:
    """What goes wrong in this step on this rank."""
    is_here = args.bad_rank in (-1, dist.get_rank())
    if step < args.bad_from or not is_here:
        return 1.0
    if args.fails:
        raise RuntimeError("something is wrong here")
    return float("nan")


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bad-from", type=int, default=37)
    parser.add_argument("--bad-rank", type=int, default=-1)
    parser.add_argument("--fails", action="store_true", help="end with an exception")
    parser.add_argument("--pace", type=float, default=0.02)
    args = parser.parse_args()
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.track(model=model, optimizer=optimizer)
    hold = Hold()
    for step in job.steps(args.steps):
        with step:
            loss = model(torch.ones(4, 8)).square().mean()
            loss = loss * factor(step.index, args)
            loss.backward()
            time.sleep(args.pace)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss.detach())  # behind the gate, as many scripts do
        hold.behind(step, dist.get_rank())
    if not torch.isfinite(loss):
        raise SystemExit(4)


if __name__ == "__main__":
    trainmover.run(main)
