"""Two kinds of rank whose parameters have equal names and shapes: even ranks hold one expert, odd
ranks another one. Nothing but the values tells who is whose replica."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainmover

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from pace import pause

WIDTH = 16
PAUSE_S = 0.05


def digest_of(*tensors: torch.Tensor) -> int:
    found = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors))
    return int.from_bytes(found.digest()[:8], "big") >> 1


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--final", type=Path, required=True)
    args = parser.parse_args()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups: list[Any] = [dist.new_group(list(range(kind, ranks, 2))) for kind in range(2)]
    own = groups[rank % 2]
    torch.manual_seed(rank % 2)
    expert = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(expert.parameters(), lr=1e-2)
    batches = job.batches(lambda: torch.randn(4, WIDTH))
    job.seed(5)
    job.track(expert=expert, optimizer=optimizer)
    for step in job.steps(args.steps):
        pause(step.index, args.steps, PAUSE_S)
        with step:
            loss = (expert(next(batches)) - 1.0).square().mean()
            loss.backward()
            for parameter in expert.parameters():
                dist.all_reduce(parameter.grad, group=own)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            step.log(loss=mean)
            optimizer.step()
            optimizer.zero_grad()
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, f"{digest_of(*expert.parameters()):016x}")
    if job.is_primary:
        args.final.write_text(str(told).replace("'", '"'))


if __name__ == "__main__":
    trainmover.run(main)
