"""Measured by `trainmover bench overhead`: blocks of steps with the gate and without, in turn.

With: ordinary steps. Without: the same loop on a second copy of model and optimizer that the job
does not know, run by a function registered with `job.every`. Between two blocks of the same kind
nothing differs but what trainmover does: gate, personal state, undo set, watching, log.
Each rank writes one JSON line per block: durations of its steps, CPU time of both threads.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import train_gpt

import trainmover

IO_THREAD = "trainmover-io"


def io_thread_ns() -> int:
    """CPU time of the communicator's thread so far. Raises RuntimeError where there is none."""
    for thread in threading.enumerate():
        if thread.name == IO_THREAD:
            stat = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            return int(stat.read_text().split()[0])
    raise RuntimeError(f"no thread {IO_THREAD}: this script runs under trainmover only")


class Blocks:
    """What the blocks of one rank took."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        self.steps_s: list[float] = []
        self.worker_ns = time.thread_time_ns()
        self.io_ns = io_thread_ns()
        self.last_s = time.perf_counter()

    def step(self) -> None:
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self.last_s)
        self.last_s = now_s

    def end(self, kind: str, index: int) -> None:
        worker_ns, io_ns = time.thread_time_ns() - self.worker_ns, io_thread_ns() - self.io_ns
        line = {
            "kind": kind,
            "block": index,
            "steps_s": self.steps_s,
            "worker_cpu_s": worker_ns / 1e9,
            "io_cpu_s": io_ns / 1e9,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def sleeper(args: argparse.Namespace, job: trainmover.Job) -> tuple[Any, Any, Callable[[], Any]]:
    """Instead of computing, sleep; the update is of one number, so the gate is all there is."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(1, 1)

    def forward() -> torch.Tensor:
        time.sleep(args.sleep)
        loss: torch.Tensor = model(batch).sum()
        return loss

    return model, optimizer, forward


def trainer(args: argparse.Namespace, job: trainmover.Job) -> tuple[Any, Any, Callable[[], Any]]:
    """The GPT of the demo on one batch that never changes."""
    model = train_gpt.build_model(args, job.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    window = torch.randint(0, 256, (args.batch, args.sequence + 1))
    return model, optimizer, lambda: model(window[:, :-1], window[:, 1:])


def update(optimizer: Any, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
    loss = forward()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    build = sleeper if args.sleep else trainer
    model, optimizer, forward = build(args, job)
    free_model, free_optimizer, free_forward = build(args, job)
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer, ignore=[free_model, free_optimizer])
    blocks: Blocks | None = None
    length = args.block

    @job.every(length)
    def without_gate() -> None:
        nonlocal blocks
        index = (at.index + 1) // length - 1
        if blocks is None:
            blocks = Blocks(args.folder / f"blocks-{dist.get_rank()}.jsonl")
            args.folder.mkdir(parents=True, exist_ok=True)
        else:
            blocks.end("with", index)
        gc.collect()
        dist.barrier()
        blocks.start()
        for _ in range(length):
            update(free_optimizer, free_forward)
            blocks.step()
        blocks.end("without", index)
        gc.collect()
        dist.barrier()
        blocks.start()

    for at in job.steps(args.steps):
        with at:
            loss = update(optimizer, forward)
            at.log(loss=loss.detach())
        if blocks is not None:
            blocks.step()


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path, required=True, help="where block files go")
    parser.add_argument("--block", type=int, default=20, help="steps per block")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds instead of a forward")
    own, rest = parser.parse_known_args()
    train(job, argparse.Namespace(**vars(train_gpt.parse_arguments(rest)), **vars(own)))


if __name__ == "__main__":
    trainmover.run(main)
