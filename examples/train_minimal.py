"""The smallest script that survives the loss of a machine: next-byte prediction with DDP.

    trainmover run --machines 4 --standby 1 examples/train_minimal.py

The same file runs as `python examples/train_minimal.py` and under plain `torchrun`.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainmover

CONTEXT = 16
SEED = 1


class Windows(Dataset[torch.Tensor]):
    """Windows of CONTEXT + 1 bytes over a few modules of the standard library."""

    def __init__(self) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = sorted(folder.glob("*.py"), key=lambda file: file.name)[:60]
        text = b"".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // CONTEXT - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * CONTEXT
        return self.text[start : start + CONTEXT + 1].long()


def build() -> nn.Module:
    """An embedding of the last CONTEXT bytes, a hidden layer, a distribution over the next byte."""
    hidden = nn.Linear(CONTEXT * 32, 256)
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), hidden, nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 256)
    )


def main(job: trainmover.Job) -> None:
    torch.manual_seed(SEED)
    data = Windows()
    model = DistributedDataParallel(build().to(job.device_type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, shuffle=True, seed=SEED)
    batches = job.batches(DataLoader(data, batch_size=256, sampler=sampler, drop_last=True))
    job.seed(SEED)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in job.steps(200):
        with step:
            window = next(batches).to(job.device_type)
            loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
            loss.backward()
            step.log(loss=loss)  # before the update: told even if rank 0 is lost right after it
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    trainmover.run(main)
