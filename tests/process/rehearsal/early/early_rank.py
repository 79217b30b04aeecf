"""A script that reads its rank in front of `main`, and numbers that depend on it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from early_shares import share
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainmover

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from pace import pause

rank = int(os.environ["RANK"])
scale = 1.0 + rank / 8


def main(job: trainmover.Job) -> None:
    """As ordinary as the rest of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--final", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    inputs = share(torch.randn(480, 8))
    samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin())
    batches = job.batches(DataLoader(samples, batch_size=4, shuffle=True))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.seed(5)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(args.steps):
        with step:
            pause(step.index, args.steps, 0.03)
            read, wanted = next(batches)
            loss = scale * nn.functional.mse_loss(model(read), wanted)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            step.log(loss=mean)
            optimizer.step()
            optimizer.zero_grad()
    if args.final is not None:
        sha = hashlib.sha256()
        for parameter in model.parameters():
            sha.update(parameter.detach().numpy().tobytes())
        digests = [sha.hexdigest()[:16]] * dist.get_world_size()
        if job.is_primary:
            args.final.write_text(json.dumps({"digests": digests}))


if __name__ == "__main__":
    trainmover.run(main)
