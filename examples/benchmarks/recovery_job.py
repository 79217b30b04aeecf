"""Our side of most benchmarks: the model of train_gpt.py, with an event file each.

The same training as examples/baselines/torchrun_dcp.py, which is the other side; both write one
JSON line per committed step and rank into FOLDER/events, with CLOCK_MONOTONIC times.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import train_gpt
from baselines.torchrun_dcp import Journal
from benchmarks.disturbances import Hold, Slowdown

import trainmover


def use_cache(folder: Path | None) -> None:
    """A compile cache per played machine: warm ones stay warm, a standby's is empty at first."""
    if folder is not None:
        machine = os.environ.get("TRAINMOVER_MACHINE", "m0")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / machine)


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    use_cache(args.cache)
    model = train_gpt.build_model(args, job.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    scheduler = train_gpt.build_schedule(optimizer, args.steps)
    batches = job.batches(train_gpt.build_loader(args))
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler)
    journal: Journal | None = None
    hold, slowdown = Hold(), Slowdown()
    for step in job.steps(args.steps):
        if not job.is_shadow:
            hold.enter(step.index, args.steps)
        with step:
            window = next(batches)
            if not job.is_shadow:
                slowdown.forward(step.index)
            loss = model(window[:, :-1], window[:, 1:])
            loss.backward()
            mean = train_gpt.mean_over_ranks(loss)
            step.log(loss=mean)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and not job.is_shadow:
            if journal is None:
                journal = Journal(args.folder / "events", dist.get_rank())
            journal.write("step", step=step.index, loss=float(mean).hex())
    if args.final is not None:
        train_gpt.write_final(job, args, model, optimizer)


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path, required=True, help="where events/ is made")
    parser.add_argument("--cache", type=Path, help="folder of compile caches, one per machine")
    own, rest = parser.parse_known_args()
    train(job, argparse.Namespace(**vars(train_gpt.parse_arguments(rest)), **vars(own)))


if __name__ == "__main__":
    trainmover.run(main)
