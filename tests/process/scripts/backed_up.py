"""Ranks with state that nobody else has, and the ways of updating it that backups repeat."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.holding import Hold
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainmover
from trainmover.drills import pauses

WIDTH = 32
SKIPPED_EVERY = 5


def sharded() -> nn.Module:
    """Pure FSDP2."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def alone(rank: int) -> nn.Module:
    """A model per rank, with statistics that change in its forward."""
    torch.manual_seed(100 + rank)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """With two groups."""
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:]}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all this rank holds."""
    sha = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        state = optimizer.state.get(tensor, {})
        for each in (tensor, *(value for _, value in sorted(state.items()))):
            local = each.to_local() if hasattr(each, "to_local") else each
            sha.update(local.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    """What no optimizer knows of."""
    for parameter in model.parameters():
        parameter.mul_(0.999)


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sleep", type=float, default=0.04)
    parser.add_argument("--kind", choices=["sharded", "alone"], default="sharded")
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--scaler", action="store_true", help="whose every fifth step is skipped")
    parser.add_argument("--shrink", action="store_true", help="weights change behind the update")
    parser.add_argument("--final", type=Path)
    args = parser.parse_args()
    model = sharded() if args.kind == "sharded" else alone(job.rank)
    optimizer = optimizer_of(model, args.optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4, enabled=args.scaler)
    job.seed(7)
    job.track(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    hold = Hold()
    for step in job.steps(args.steps):
        with step:
            time.sleep(0.0 if pauses.is_hurried() else args.sleep)
            inputs = torch.randn(6, 8) + step.index % 3
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            is_skipped = args.scaler and step.index % SKIPPED_EVERY == SKIPPED_EVERY - 1
            scaler.scale(loss * float("inf") if is_skipped else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            step.log(loss=mean)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            if args.shrink:
                shrink(model)
            optimizer.zero_grad()
        hold.behind(step, job.rank)
    own = torch.tensor([int(digest_of(model, optimizer)[:15], 16)])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    if args.final is not None and job.is_primary:
        args.final.write_text(json.dumps({"digests": [f"{int(d.item()):016x}" for d in every]}))


if __name__ == "__main__":
    trainmover.run(main)
