"""The text: the Python standard library's own sources, cut into windows and shared out."""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass(frozen=True)
class Share:
    """Which part of each epoch a rank reads. Ranks that hold parts of one model read the same."""

    index: int
    count: int


def standard_library_text() -> bytes:
    """The standard library's own .py files, joined in the order of their relative paths."""
    folder = Path(sysconfig.get_path("stdlib"))
    by_name = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
    ours = {"site-packages", "dist-packages", "__pycache__"}
    names = sorted(name for name in by_name if not ours.intersection(name.split("/")))
    return b"".join(by_name[name].read_bytes() for name in names)


class Windows(Dataset[torch.Tensor]):
    """Non-overlapping windows of `sequence` bytes and the byte that follows."""

    def __init__(self, text: bytes, sequence: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.sequence
        return self.text[start : start + self.sequence + 1].long()


def build_loader(args: argparse.Namespace, share: Share | None = None) -> DataLoader[torch.Tensor]:
    """This rank's part of a shuffled epoch, read by worker processes; by rank unless shared."""
    windows = Windows(standard_library_text(), args.sequence)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        windows,
        num_replicas=None if share is None else share.count,
        rank=None if share is None else share.index,
        shuffle=True,
        seed=args.seed,
        drop_last=True,
    )
    return DataLoader(
        windows,
        batch_size=args.batch,
        sampler=sampler,
        num_workers=args.workers,
        drop_last=True,
    )
