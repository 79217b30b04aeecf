"""A job small enough to be run dozens of times: an MLP with dropout, read through a sampler.

Everything that a joiner could get wrong is in it: shuffled DistributedSampler, a seed that depends
on the rank, dropout, momentum, a schedule, a hand-written optimizer that can die half-way. The
flags say where this process kills itself, once: a marker file tells that it has.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pace import pause  # beside this script, wherever it is run from
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

WIDTH = 24


class Momentum(torch.optim.Optimizer):
    """SGD with momentum whose update can be cut short by `die`."""

    def __init__(self, parameters: Any, rate: float, die: Any) -> None:
        super().__init__(parameters, {"lr": rate, "momentum": 0.9})
        self.die = die

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(state["velocity"], alpha=group["lr"])
                if number == 1:
                    self.die("optimizer")


class Deaths:
    """`TINY_DIE=WINDOW:STEP:RANK,...`: the rank kills itself in the window of that step, once.

    In the environment, not in the arguments: the undisturbed run has the same command line.
    """

    def __init__(self, job: trainmover.Job) -> None:
        self.job = job
        self.step = -1
        self.folder = Path(os.environ.get("TRAINMOVER_FAULT_MARKS", "."))
        self.planned = {}
        for text in filter(None, os.environ.get("TINY_DIE", "").split(",")):
            window, step, rank = text.split(":")
            self.planned[window, int(step)] = int(rank)

    def __call__(self, window: str) -> None:
        rank = self.planned.get((window, self.step))
        if rank is None or self.job.is_shadow or dist.get_rank() != rank:
            return
        try:
            (self.folder / f"{window}-{self.step}-{rank}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def build(job: trainmover.Job, args: argparse.Namespace, die: Deaths) -> Any:
    die("build")
    if args.groups:
        pair = dist.new_group([0, 1])
        die("groups")
        dist.barrier(group=pair)
    torch.manual_seed(args.seed)
    inputs = torch.randn(640, 8)
    targets = torch.sin(inputs.sum(dim=1, keepdim=True))
    samples = TensorDataset(inputs, targets)
    sampler = DistributedSampler(samples, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(samples, batch_size=4, sampler=sampler, num_workers=args.workers)
    layers = nn.Sequential(
        nn.Linear(8, WIDTH), nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )
    head = nn.Linear(WIDTH, 1)
    model = DistributedDataParallel(nn.Sequential(layers, head))
    optimizer = Momentum(model.parameters(), 0.05, die)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.9)
    batches = job.batches(loader)
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)
    return model, optimizer, scheduler, batches


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            sha.update(tensor.detach().contiguous().numpy().tobytes())
    return int.from_bytes(sha.digest()[:8], "big") >> 1


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    die = Deaths(job)
    model, optimizer, scheduler, batches = build(job, args, die)

    if args.every:

        @job.every(args.every)
        def evaluate() -> None:
            die("every")
            total = torch.ones(1)
            dist.all_reduce(total)
            die("every_late")
            if job.is_primary and args.save is not None:
                torch.save({"model": model.state_dict()}, args.save)
                die("save")

    for step in job.steps(args.steps):
        die.step = step.index
        with step:
            pause(step.index, args.steps, args.sleep)
            inputs, targets = next(batches)
            die("forward")
            loss = nn.functional.mse_loss(model(inputs), targets)
            die("backward")
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
            step.log(loss=mean)
            if args.raise_at == step.index and raises_here(args):
                raise error_of(args, step.index)
            if args.noise == step.index:
                print("x" * (10 << 20), flush=True)
            die("gate")
            optimizer.step()
            die("scheduler")
            scheduler.step()
            optimizer.zero_grad()
            if args.tail:
                die("tail")
                value = torch.ones(3)
                dist.all_reduce(value)
        die("between")
    if args.final is not None:
        write_final(job, args, model, optimizer)
    print(f"code behind the loop ran in {os.getpid()}", flush=True)


def raises_here(args: argparse.Namespace) -> bool:
    """Everywhere, or on one machine only."""
    return not args.raise_on or os.environ.get("TRAINMOVER_MACHINE") == args.raise_on


def error_of(args: argparse.Namespace, step: int) -> Exception:
    """The script's own mistake, or a machine's."""
    if args.raise_on:
        return OSError(errno.EIO, os.strerror(errno.EIO))
    return ValueError(f"bad argument in step {step}")


def write_final(job: Any, args: argparse.Namespace, model: Any, optimizer: Any) -> None:
    own = torch.tensor([digest_of(model, optimizer)])
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    if job.is_primary:
        text = json.dumps({"digests": [f"{int(d.item()):016x}" for d in digests]})
        args.final.write_text(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--sleep", type=float, default=0.03)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--noise", type=int, default=-1)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--raise-on", default="")
    parser.add_argument("--raise-import", action="store_true")
    parser.add_argument("--final", type=Path)
    return parser.parse_args()


def main(job: trainmover.Job) -> None:
    train(job, parse_arguments())


if __name__ == "__main__":
    if "--raise-import" in sys.argv:
        raise ValueError("bad argument at import")
    trainmover.run(main)
