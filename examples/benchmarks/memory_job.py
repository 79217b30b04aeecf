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
    storages: dict[int, int] = {}
    buffers = 0
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, torch.Tensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        elif kind is bytearray and len(found) >= 65536:
            buffers += len(found)
    return sum(storages.values()), buffers


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


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    model = train_gpt.build_model(args, job.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate)
    batches = job.batches(train_gpt.build_loader(args))
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer)
    log = Log(args.folder)
    generation = 0
    is_peak_known = False
    step_index = 0
    try:
        for step in job.steps(args.steps):
            step_index = step.index
            is_live = not job.is_shadow
            if is_live and generation not in (0, job.generation):
                log.write("switched", dist.get_rank(), step.index)
                is_peak_known = True
            elif is_live and generation == 0 and step.index > args.reset_at:
                log.write("joined", dist.get_rank(), step.index)
            if is_live:
                generation = job.generation
            if is_live and step.index == args.reset_at:
                reset_high_water()
            with step:
                window = next(batches)
                loss = model(window[:, :-1], window[:, 1:])
                loss.backward()
                step.log(loss=loss.detach())
                if is_live and step.index == args.reset_at + WINDOW - 1:
                    # Gradients are complete here: all that training holds, activations apart.
                    log.write("trained", dist.get_rank(), step.index)
                    is_peak_known = True
                optimizer.step()
                optimizer.zero_grad()
            if is_live and step.index == args.reset_at + WINDOW:
                reset_high_water()
    except trainmover.Left:
        if is_peak_known:
            log.write("left", -1, step_index)
        raise


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path, required=True, help="where the lines go")
    parser.add_argument("--reset-at", type=int, default=10, help="step at which marks are reset")
    own, rest = parser.parse_known_args()
    train(job, argparse.Namespace(**vars(train_gpt.parse_arguments(rest)), **vars(own)))


if __name__ == "__main__":
    trainmover.run(main)
