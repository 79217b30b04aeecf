"""Measured by `trainmover bench memory`: what a planned switchover adds to a process's memory.

Writes one JSON line per process and moment: the high-water mark of resident memory since the last
reset (the kernel's, reset at step RESET_AT), bytes of all tensors that the job holds, and bytes of
trainmover's own buffers, counted by walking live objects.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import train_gpt

import trainmover

WINDOW = 20
"""Steps whose peak is the training peak."""


def high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def reset_high_water() -> None:
    """Free what the allocator keeps, then let the kernel's mark start at what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def counted_bytes() -> tuple[int, int]:
    """Bytes of distinct tensor storages, and of byte buffers of 64 KiB and more."""
    tensors: list[torch.Tensor] = []
    buffers = 0
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, torch.Tensor):
            tensors.append(found)
        elif kind is bytearray and len(found) >= 65536:
            buffers += len(found)
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values()), buffers


class Log:
    def __init__(self, folder: Path) -> None:
        self.path = folder / f"memory-{os.getpid()}.jsonl"

    def write(self, moment: str, rank: int, step: int, **more: Any) -> None:
        tensors, buffers = counted_bytes()
        line = {
            "moment": moment,
            "rank": rank,
            "step": step,
            "pid": os.getpid(),
            "high_water_bytes": high_water_bytes(),
            "tensor_bytes": tensors,
            "buffer_bytes": buffers,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | more) + "\n")


class Watch:
    """When to reset the mark and when to write it down."""

    def __init__(self, job: trainmover.Job, args: argparse.Namespace) -> None:
        self.job = job
        self.log = Log(args.folder)
        self.reset_at = args.reset_at
        self.generation = 0
        self.step = 0

    def enter(self, step: int) -> None:
        """In front of a step: nothing of this step counts yet."""
        self.step = step
        if self.job.is_shadow:
            return
        if self.generation not in (0, self.job.generation):
            self.log.write("switched", dist.get_rank(), step)
        elif self.generation == 0 and step > self.reset_at:
            self.log.write("joined", dist.get_rank(), step)
        self.generation = self.job.generation
        if step in (self.reset_at, self.reset_at + WINDOW + 1):
            reset_high_water()

    def gradients_complete(self) -> None:
        """In front of the update: all that training holds, activations apart."""
        if not self.job.is_shadow and self.step == self.reset_at + WINDOW - 1:
            self.log.write("trained", dist.get_rank(), self.step)


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    model = train_gpt.build_model(args, job.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    batches = job.batches(train_gpt.build_loader(args))
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer)
    watch = Watch(job, args)
    try:
        for step in job.steps(args.steps):
            watch.enter(step.index)
            with step:
                window = next(batches)
                loss = model(window[:, :-1], window[:, 1:])
                loss.backward()
                step.log(loss=loss.detach())
                watch.gradients_complete()
                optimizer.step()
                optimizer.zero_grad()
    except trainmover.Left:
        watch.log.write("left", -1, watch.step)
        raise


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path, required=True, help="where the lines go")
    parser.add_argument("--reset-at", type=int, default=10, help="step at which marks are reset")
    own, rest = parser.parse_known_args()
    train(job, argparse.Namespace(**vars(train_gpt.parse_arguments(rest)), **vars(own)))


if __name__ == "__main__":
    trainmover.run(main)
