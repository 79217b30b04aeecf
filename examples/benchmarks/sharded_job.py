"""Measured by `trainmover bench restore`: FSDP2, each rank holds a part that nobody else has."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import trainmover

DEPTH = 4


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Linear(16, args.width)]
    for _ in range(DEPTH):
        layers += [nn.GELU(), nn.Linear(args.width, args.width)]
    model = nn.Sequential(*layers, nn.Linear(args.width, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.seed(7)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(args.steps):
        with step:
            inputs = torch.randn(8, 16)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    trainmover.run(main)
