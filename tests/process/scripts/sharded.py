"""Pure FSDP2: each rank holds a part that nobody else has."""

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


def whole_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and optimizer state, gathered: the same on any number of ranks."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(value for _, value in sorted(state.items()))):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            sha.update(whole.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def dump(job: trainmover.Job, path: Path, step: int, digest: str) -> None:
    if job.is_primary:
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "digest": digest}) + "\n")


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sleep", type=float, default=0.03)
    parser.add_argument("--dump", type=Path, help="digest of the gathered state, step by step")
    parser.add_argument("--callable", action="store_true")
    parser.add_argument("--final", type=Path)
    args = parser.parse_args()
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(8, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(WIDTH, 1),
    )
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.seed(7)
    job.track(model=model, optimizer=optimizer)

    def train(step: trainmover.Step, index: int) -> float:
        time.sleep(0.0 if pauses.is_hurried() else args.sleep)
        inputs = torch.randn(6, 8) + index % 3
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        step.log(loss=mean)
        optimizer.step()
        optimizer.zero_grad()
        return float(mean)

    hold = Hold()
    for step in job.steps(args.steps):
        if args.dump is not None:
            dump(job, args.dump, step.index, whole_digest(model, optimizer))
        if args.callable:
            result = step.run(train, step, step.index)
            if step.committed:
                assert result is not None
        else:
            with step:
                train(step, step.index)
        hold.behind(step, job.rank)
    if args.final is not None:
        sha = hashlib.sha256()
        for parameter in model.parameters():
            for tensor in (parameter, *(v for _, v in sorted(optimizer.state[parameter].items()))):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                sha.update(local.detach().contiguous().numpy().tobytes())
        own = torch.tensor([int.from_bytes(sha.digest()[:8], "big") >> 1])
        every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        if job.is_primary:
            args.final.write_text(json.dumps({"digests": [f"{int(d.item()):016x}" for d in every]}))


if __name__ == "__main__":
    trainmover.run(main)
