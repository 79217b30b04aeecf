"""A training script with mistakes that only show after a loss; its argument names them.

Each is a line or two in an otherwise exact script; a test asks for its place by its mark.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import trainmover

FAULTS = set(sys.argv[1].split(",")) if len(sys.argv) > 1 else set()
LOG = Path(tempfile.gettempdir()) / "trainmover-faulty.log"


def read() -> torch.Tensor:
    if "loader" in FAULTS:
        dist.all_reduce(torch.ones(1))  # mark: loader
    return torch.randn(8, 4)


def main(job: trainmover.Job) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ema = AveragedModel(model.module) if "ema" in FAULTS else None  # mark: ema
    rank = dist.get_rank() if "rank" in FAULTS else 0  # mark: rank
    batches = job.batches(read)
    job.seed(2)
    job.track(model=model, optimizer=optimizer)
    if "write" in FAULTS:
        LOG.open("w").close()  # mark: write
    seen = 1
    ahead = torch.zeros(8, 4)
    for step in job.steps(400):
        with step:
            time.sleep(0.05)
            inputs = next(batches)
            if "inplace" in FAULTS:
                inputs.mul_(2)  # mark: inplace
            if "carried" in FAULTS:
                inputs, ahead = ahead, inputs  # mark: carried
            loss = model(inputs).square().mean()
            if "counter" in FAULTS:
                loss = loss / seen
                seen += 1  # mark: counter
            loss.backward()
            step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            if "tail" in FAULTS:
                dist.all_reduce(loss.detach())  # mark: tail
            if ema is not None:
                ema.update_parameters(model.module)
    print(rank)


if __name__ == "__main__":
    trainmover.run(main)
