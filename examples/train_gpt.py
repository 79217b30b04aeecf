"""A byte-level GPT on the Python standard library's sources: the script behind `make demo`.

    trainmover run --machines 4 --standby 1 examples/train_gpt.py --steps 200
    trainmover run --machines 4 --standby 1 examples/train_gpt.py --parallel pp --schedule 1f1b

The same file runs as `python examples/train_gpt.py` and under plain `torchrun`. The text is on
every machine that has Python, so there is nothing to download; machines of one job need the same
Python version, else they would read different text.

The model is in gpt/model.py, the ways to spread it over ranks in gpt/layouts.py and
gpt/pipeline.py, the text in gpt/data.py.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from gpt.data import build_loader
from gpt.layouts import (
    Layout,
    MixtureOfExperts,
    Tensor,
    Zero,
    build_model,
    mean_over_ranks,
)
from gpt.pipeline import Pipeline
from gpt.record import LossFile, digest_of, write_digests
from torch import nn

import trainmover

__all__ = [
    "build_loader",
    "build_model",
    "build_schedule",
    "mean_over_ranks",
    "parse_arguments",
    "write_final",
]

PARALLEL = ("ddp", "fsdp2", "hsdp", "zero", "tp", "pp", "3d", "moe")


def build_layout(args: argparse.Namespace, device_type: str) -> Layout:
    """The model as this job runs it."""
    layout: Layout
    match args.parallel:
        case "tp":
            layout = Tensor(args, device_type)
        case "pp" | "3d":
            layout = Pipeline(args, device_type)
        case "moe":
            layout = MixtureOfExperts(args, device_type)
        case "zero":
            layout = Zero(args, build_model(args, device_type), device_type)
        case _:
            layout = Layout(args, build_model(args, device_type), device_type)
    if not layout.can_clip_and_scale and (args.clip > 0 or args.amp):
        raise SystemExit(f"--clip and --amp are not made for --parallel {args.parallel}")
    return layout


def build_schedule(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over a tenth of the steps (at most 20), then a cosine down to a tenth."""
    warm_up = max(1, min(20, steps // 10))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        share = (step - warm_up) / max(1, steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, share)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    """Build everything in ordinary PyTorch, then one `with step` per update."""
    layout = build_layout(args, job.device_type)
    model, optimizer = layout.model, layout.optimizer()
    scheduler = build_schedule(optimizer, args.steps)
    scaler = torch.amp.GradScaler(job.device_type, enabled=args.amp)
    losses = LossFile(args.losses)
    batches = job.batches(build_loader(args, layout.share))
    job.seed(layout.seed, per_rank=layout.is_seeded_by_rank)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, losses=losses)
    for step in job.steps(args.steps):
        with step:
            window = next(batches).to(job.device_type, non_blocking=True)
            loss = layout.gradients(window, scaler)
            if args.clip > 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            mean = layout.mean(loss)
            losses.note(step.index, mean)
            step.log(loss=mean)  # before the update: told even if rank 0 is lost right after it
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            if job.is_primary:
                step.after(losses.write)
    if args.final is not None:
        write_final(job, args, model, optimizer)


def write_final(
    job: trainmover.Job,
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """One digest per rank of all it holds, written by the primary."""
    write_digests(job, args.final, args.steps, digest_of(model, optimizer))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT.")
    parser.add_argument("--steps", type=int, default=200, help="updates in total")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes per window")
    parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--parallel", choices=PARALLEL, default="ddp")
    parser.add_argument("--tensor", type=int, default=2, help="tp, 3d: ranks that split a block")
    parser.add_argument("--stages", type=int, default=2, help="pp, 3d: ranks of a pipeline")
    parser.add_argument("--schedule", choices=("1f1b", "interleaved"), default="1f1b")
    parser.add_argument("--microbatches", type=int, default=4, help="pp, 3d: parts of a batch")
    parser.add_argument("--split", default="", help="pp, 3d: blocks of each stage, such as 3,1")
    parser.add_argument("--shapes", choices=("given", "exchanged"), default="given")
    parser.add_argument("--experts", type=int, default=4, help="moe: experts of each block")
    parser.add_argument("--compile", action="store_true", help="torch.compile for every block")
    parser.add_argument("--compiler", default="inductor", help="back end of torch.compile")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm; 0 = no clipping")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast and a GradScaler")
    # torchrun takes a script's --log for an abbreviation of its own flags, hence the second name.
    parser.add_argument("--losses", "--log", type=Path, help="JSON line per step: step, loss")
    parser.add_argument("--final", type=Path, help="JSON of the final digests")
    return parser.parse_args(arguments)


def main(job: trainmover.Job) -> None:
    train(job, parse_arguments())


if __name__ == "__main__":
    trainmover.run(main)
