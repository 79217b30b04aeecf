"""A pipeline with two kinds of stage: one sees pictures, the other writes about them.

    trainmover run --machines 4 --standby 1 examples/train_two_modalities.py --steps 100

Half of the ranks encode pictures, half predict the text from what the first half sends them; each
half holds replicas of its kind. Runs on 2 ranks or a multiple.

Shapes: B batch of a microbatch, P patches of a picture, T text tokens, C width, V vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt.data import Share
from gpt.layouts import compile_blocks
from gpt.record import digest_of, write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

PATCHES, PIXELS, TOKENS, VOCABULARY, WIDTH = 9, 16, 6, 32, 24
BATCH, MICROBATCHES = 8, 4
SAMPLES = 4096


class Eye(nn.Module):
    """Pictures to features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.mix = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """[B, P, pixels] -> [B, P, C]."""
        features: torch.Tensor = self.mix(self.embed(pictures))
        return features


class Pen(nn.Module):
    """Features and the text so far to the next token: other layers, other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.look = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.predict = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, VOCABULARY)
        )

    def forward(self, features: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """[B, P, C] and [B, T] -> [B, T, V]."""
        words = self.embed(text)
        seen, _ = self.look(words, features, features, need_weights=False)
        result: torch.Tensor = self.predict(self.norm(words + seen))
        return result


def pictures_and_texts(seed: int) -> TensorDataset:
    """Random pictures; each token is told by the brightness of the patch of its place."""
    made = torch.Generator().manual_seed(seed)
    pictures = torch.randn(SAMPLES, PATCHES, PIXELS, generator=made)
    brightness = pictures.mean(2)[:, : TOKENS + 1]
    text = ((brightness + 1) / 2 * VOCABULARY).long().clamp(0, VOCABULARY - 1)
    return TensorDataset(pictures, text)


def next_token_loss(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), text.flatten())


class TwoStages:
    """This rank's stage, and the schedule that both kinds follow."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        ranks = dist.get_world_size()
        if ranks % 2:
            raise SystemExit(f"two kinds of stage need an even number of ranks, there are {ranks}")
        mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("kind", "replica"))
        self.kind = mesh.get_local_rank("kind")
        self.share = Share(mesh.get_local_rank("replica"), ranks // 2)
        torch.manual_seed(args.seed)
        stages = (Eye().to(device), Pen().to(device))
        self.model: nn.Module = stages[self.kind]
        compile_blocks(args, [self.model])
        if ranks > 2:
            group = mesh["replica"].get_group()
            self.model = DistributedDataParallel(self.model, process_group=group)
        each = BATCH // MICROBATCHES
        features = torch.empty(each, PATCHES, WIDTH, requires_grad=True, device=device)
        pictures = torch.empty(each, PATCHES, PIXELS, device=device)
        logits = torch.empty(each, TOKENS, VOCABULARY, device=device)
        stage = PipelineStage(
            self.model,
            self.kind,
            2,
            torch.device(device),
            input_args=(pictures,) if self.kind == 0 else (features,),
            output_args=(features,) if self.kind == 0 else (logits,),
            group=mesh["kind"].get_group(),
        )
        self.schedule: Any = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)

    def gradients(self, pictures: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one batch; the mean loss of all that have one."""
        losses: list[torch.Tensor] = []
        if self.kind == 0:
            self.schedule.step(pictures, return_outputs=False)
        else:
            self.schedule.step(
                text=text[:, :-1], target=text[:, 1:], losses=losses, return_outputs=False
            )
        own = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(own)
        return own / self.share.count


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    stages = TwoStages(args, job.device_type)
    optimizer = torch.optim.AdamW(stages.model.parameters(), lr=args.rate)
    data = pictures_and_texts(args.seed)
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=stages.share.count, rank=stages.share.index, seed=args.seed
    )
    batches = job.batches(
        DataLoader(data, BATCH, sampler=sampler, drop_last=True, num_workers=args.workers)
    )
    job.seed(args.seed)
    job.track(model=stages.model, optimizer=optimizer)
    for step in job.steps(args.steps):
        with step:
            loss = stages.gradients(*next(batches))
            step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    if args.final is not None:
        write_digests(job, args.final, args.steps, digest_of(stages.model, optimizer))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a pipeline with two kinds of stage.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile for each stage")
    parser.add_argument("--compiler", default="inductor", help="back end of torch.compile")
    parser.add_argument("--final", type=Path, help="JSON of the final digests")
    return parser.parse_args(arguments)


def main(job: trainmover.Job) -> None:
    train(job, parse_arguments())


if __name__ == "__main__":
    trainmover.run(main)
