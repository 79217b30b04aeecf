"""A script whose state is one number all over, another one behind each step (C21).

Behind n steps every parameter is n (n + 1) / 2 and every moment -n, exactly.

    trainmover run tests/cases/rising.py --elements 1000000
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import trainmover

STEPS = 5000
"""float32 holds every value up to here exactly."""


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, required=True)
    args = parser.parse_args()
    model = nn.Linear(args.elements // 2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            model.weight.grad = torch.full_like(model.weight, -1.0)
            optimizer.step()
            step.log(loss=model.weight[0, 0])
        time.sleep(0.005)


if __name__ == "__main__":
    trainmover.run(main)
