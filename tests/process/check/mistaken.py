"""A training script with one of the mistakes that need a job of several ranks to show."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainmover

# A spawned loader worker imports this file with its own command line.
MISTAKE = sys.argv[1] if len(sys.argv) > 1 else "unguarded"

if MISTAKE == "early":
    dist.get_rank()


def main(job: trainmover.Job) -> None:
    torch.manual_seed(0)
    if MISTAKE == "groups":
        dist.init_process_group("nccl")
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    if MISTAKE == "backend":
        dist.new_group(backend="ucc")
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(64, 4))
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(samples, batch_size=4, **(options if MISTAKE == "unguarded" else {}))
    batches = job.batches(loader)
    more = {f"value{job.rank}": trainmover.Value(1)} if MISTAKE == "names" else {}
    job.track(model=model, optimizer=optimizer, **more)
    for step in job.steps(5 + 3 * job.rank if MISTAKE == "unequal" else 12):
        leaves = {"break-one": job.rank == 1, "groups": True}.get(MISTAKE, False)
        if leaves and step.index == 5:
            break
        with step:
            (inputs,) = next(batches)
            loss = model(inputs).square().mean()
            loss.backward()
            step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
    dist.destroy_process_group()
    print("behind the loop", flush=True)


if __name__ == "__main__" or MISTAKE == "unguarded":
    trainmover.run(main)
