"""A small pipeline by hand: each rank is a stage, tensors go from stage to stage and back.

The flags make it hard to rehearse: a received tensor is normalised (zeros give NaN, which is
asserted against), an embedding's index is derived from it, rank 0 writes, removes and calls out, a
branch is first taken late.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import socket
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trainmover

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from pace import pause

WIDTH = 8
ROWS = 4
EARLIER: list[weakref.ref[nn.Module]] = []
"""Models of earlier entries of `main` in this process."""


class Body(nn.Module):
    """The part that can be compiled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out + 0.1 * x


class Stage(nn.Module):
    """What one rank computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = Body(width)
        self.table = nn.Embedding(3, WIDTH)
        self.late = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, is_late: bool) -> torch.Tensor:
        scaled = x / x.norm(dim=1, keepdim=True)
        assert bool(torch.isfinite(scaled).all()), "attention is not finite"
        index = (1.0 / scaled.detach().abs().sum(dim=1)).round().long().clamp(0, 2)
        out = self.body(scaled) + self.table(index)
        return out + self.late(out) if is_late else out


def step_of(stage: Stage, args: argparse.Namespace, index: int, rank: int, size: int) -> float:
    """Forward along the stages, backward along them."""
    is_late = 0 <= args.branch_at <= index
    torch.manual_seed(1000 + index)
    x = torch.randn(ROWS, WIDTH)
    if rank > 0:
        x = torch.empty(ROWS, WIDTH)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    out = stage(x, is_late=is_late)
    loss = out.square().mean()
    if rank < size - 1:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        (out * gradient).sum().backward()
    else:
        loss.backward()
    if rank > 0:
        assert x.grad is not None
        dist.send(x.grad, rank - 1)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def impure(folder: Path) -> None:
    """What scripts do as rank 0 before the first step."""
    with open(folder / "train.log", "w") as log:
        log.write("begins\n")
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    torch.save({"step": 0}, folder / "out" / "first.pt")
    try:
        with socket.create_connection(("127.0.0.1", 9), timeout=1):
            pass
    except OSError as error:
        print(f"no tracker: {error}", flush=True)


def main(job: trainmover.Job) -> None:
    args = parse_arguments()
    rank, size = job.rank, job.world_size
    if args.impure is not None and rank == 0:
        impure(args.impure)
    print(f"alive of earlier entries: {sum(ref() is not None for ref in EARLIER)}", flush=True)
    torch.manual_seed(rank)
    stage = Stage(WIDTH + (4 if rank in args.wide else 0))
    EARLIER.append(weakref.ref(stage))
    if args.compile:
        stage.body.compile(backend=args.compile)
    # Stages are no replicas of each other: their parameters have names of their own.
    model = nn.ModuleDict({f"stage{rank}": stage})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(args.steps):
        with step:
            pause(step.index, args.steps, args.sleep)
            step.log(loss=step_of(stage, args, step.index, rank, size))
            optimizer.step()
            optimizer.zero_grad()
            if args.extra and job.is_shadow:
                dist.all_reduce(torch.ones(5))
    if args.final is not None:
        write_final(job, args, stage)


def write_final(job: trainmover.Job, args: argparse.Namespace, stage: Stage) -> None:
    sha = hashlib.sha256()
    for parameter in stage.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    own = torch.tensor([int.from_bytes(sha.digest()[:8], "big") >> 1])
    digests = [torch.empty_like(own) for _ in range(job.world_size)]
    dist.all_gather(digests, own)
    if job.is_primary:
        text = json.dumps({"digests": [f"{int(d.item()):016x}" for d in digests]})
        args.final.write_text(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sleep", type=float, default=0.03)
    parser.add_argument("--branch-at", type=int, default=-1)
    parser.add_argument("--wide", type=int, nargs="*", default=[])
    parser.add_argument("--impure", type=Path)
    parser.add_argument("--compile", default="", help="backend of torch.compile")
    parser.add_argument("--extra", action="store_true", help="a shadow calls one more collective")
    parser.add_argument("--final", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    trainmover.run(main)
