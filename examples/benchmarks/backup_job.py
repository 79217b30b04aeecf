"""Measured by `trainmover bench snapshot`: blocks of steps backed up one by one and not, in turn.

The demo's model under FSDP2, where no rank has a replica. Between two neighbouring blocks nothing
differs but the backup: copy and digest of the gradients, the way to the peer, the peer's copy, and
the snapshots beneath. Each rank writes one JSON line per block: durations of its steps, CPU time of
both threads.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import train_gpt
from benchmarks.overhead_job import Blocks

import trainmover


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    layout = train_gpt.build_layout(args, job.device_type)
    model, optimizer = layout.model, layout.optimizer()
    window = torch.randint(0, 256, (args.batch, args.sequence + 1))
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer)
    backups = job._stepper.increments
    blocks: Blocks | None = None
    for step in job.steps(args.steps):
        index, place = divmod(step.index, args.block)
        if place == 0:
            # The first two blocks import, connect and touch memory.
            if blocks is not None and index > 2:
                blocks.end("without" if backups.is_paused else "with", index - 1)
            backups.is_paused = index % 2 == 0
            gc.collect()
            args.folder.mkdir(parents=True, exist_ok=True)
            if index >= 2:
                blocks = blocks or Blocks(args.folder / f"blocks-{dist.get_rank()}.jsonl")
                blocks.start()
        with step:
            loss = model(window[:, :-1], window[:, 1:])
            loss.backward()
            step.log(loss=loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        if blocks is not None:
            blocks.step()


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path, required=True, help="where block files go")
    parser.add_argument("--block", type=int, default=16, help="steps per block")
    own, rest = parser.parse_known_args()
    train(job, argparse.Namespace(**vars(train_gpt.parse_arguments(rest)), **vars(own)))


if __name__ == "__main__":
    trainmover.run(main)
