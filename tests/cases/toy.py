"""The toy trainer of the case collection: small, and full of state that is easily forgotten.

Tied embedding, three layers, dropout, BatchNorm; AdamW; warm-up, then cosine; a gradient scaler
with two infinite gradients; 1000 numbered samples whose items add noise from the random generators
of Python, NumPy and torch. Each rank writes one JSON line per committed step.

    trainmover run --machines 2 tests/cases/toy.py --out DIR --steps 60
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import trainmover
from tests.holding import Hold
from trainmover.drills import pauses

SAMPLES = 1000
WORDS = 32
WIDTH = 16
BATCH = 16
WARM_UP = 10
TOTAL = 200
INFINITE_AT = (13, 41)
LOADERS = {"plain": DataLoader, "stateful": StatefulDataLoader}


class Numbered(Dataset[Any]):
    """Sample i, its words, and noise from three generators."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        words = torch.tensor([(index * (k + 3)) % WORDS for k in range(4)])
        noise = random.random() + float(np.random.random()) + torch.rand(()).item()
        return index, words, torch.tensor(noise)


class Net(nn.Module):
    """Output layer and embedding share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(4 * WIDTH + 1, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, WIDTH),
        )
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """[B, 4] int64, [B] float -> [B, 32] float."""
        flat = self.embedding(words).flatten(1)
        logits: torch.Tensor = self.out(self.layers(torch.cat([flat, noise[:, None]], 1)))
        return logits


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--spread", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--loader", choices=("plain", "stateful"), default="plain")
    parser.add_argument("--validate", action="store_true", help="a fixed validation batch")
    parser.add_argument("--skew", type=float, default=0.0, help="added to its result")
    parser.add_argument("--drift", type=float, default=0.0, help="added to each logged loss")
    parser.add_argument("--forget", action="store_true", help="do not track the scheduler")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step")
    parser.add_argument("--stop-at", type=int, nargs="*", default=[], help="hold behind these")
    return parser.parse_args()


def digest(tensors: Any) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def generators() -> dict[str, str]:
    name, keys, *rest = np.random.get_state()
    return {
        "python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()),
        "numpy": xxhash.xxh3_64_hexdigest(keys.tobytes() + repr((name, rest)).encode()),
        "torch": xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().tobytes()),
    }


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [state[name] for name in sorted(state)]
    return found


def rate(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (TOTAL - WARM_UP)))


def main(job: trainmover.Job) -> None:
    args = options()
    torch.manual_seed(args.seed)
    net = Net().to(job.device_type)
    model: nn.Module = DistributedDataParallel(net) if args.spread == "ddp" else fully_shard(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=7)
    data = Numbered(args.samples)
    sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=args.seed)
    batches = job.batches(
        LOADERS[args.loader](
            data,
            batch_size=BATCH,
            sampler=sampler,
            num_workers=args.workers,
            worker_init_fn=seed_worker if args.workers else None,
        )
    )
    job.seed(args.seed)
    known = {} if args.forget else {"scheduler": scheduler}
    job.track(model=model, optimizer=optimizer, scaler=scaler, **known)
    if args.validate:
        job.validation(lambda: {"loss": validate(model) + args.skew})
    trace = Trace(job, args.out)
    hold = Hold(args.stop_at, args.out)
    for step in job.steps(args.steps):
        with step:
            infinite = step.index in INFINITE_AT
            parts = [
                backward(model, next(batches), scaler, args.accumulate, infinite=infinite)
                for _ in range(args.accumulate)
            ]
            total = torch.stack([loss for _, loss in parts]).sum()
            time.sleep(0.0 if pauses.is_hurried() else args.pace)
            step.log(loss=total + args.drift)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            ids = [index for indices, _ in parts for index in indices]
            facts = {"ids": ids, "loss": total.item().hex()}
            objects = (model, optimizer, scaler)
            step.after(lambda at=step.index, facts=facts, of=objects: trace.write(at, facts, *of))
        hold.behind(step, dist.get_rank())


def backward(
    model: nn.Module, batch: Any, scaler: Any, share: int, *, infinite: bool
) -> tuple[list[int], torch.Tensor]:
    """Gradients of one batch; its sample ids and its loss, 0-dim float."""
    index, words, noise = batch
    loss = nn.functional.cross_entropy(model(words, noise), words[:, 0])
    if infinite:
        loss = loss * torch.tensor(float("inf"))
    scaler.scale(loss / share).backward()
    return index.tolist(), loss.detach()


def validate(model: nn.Module) -> torch.Tensor:
    """Loss of one batch that is always the same, 0-dim float."""
    index = torch.arange(BATCH)
    words = torch.stack([(index * (k + 3)) % WORDS for k in range(4)], 1)
    return nn.functional.cross_entropy(model(words, torch.linspace(0, 3, BATCH)), words[:, 0])


def seed_worker(_: int) -> None:
    """Loader workers draw from their own streams; torch seeds its own and Python's."""
    np.random.seed(torch.initial_seed() % 2**32)


class Trace:
    """One file per rank."""

    def __init__(self, job: trainmover.Job, folder: Path) -> None:
        self._job = job
        self._folder = folder

    def write(
        self, step: int, facts: dict[str, Any], model: nn.Module, optimizer: Any, scaler: Any
    ) -> None:
        line = {
            "run": os.environ.get("TRAINMOVER_RUN_ID", ""),
            "generation": self._job.generation,
            "step": step,
            **facts,
            "rate": float(optimizer.param_groups[0]["lr"]).hex(),
            "scale": scaler.get_scale(),
            "growth": scaler._get_growth_tracker(),
            "parameters": digest(model.parameters()),
            "buffers": digest(model.buffers()),
            "moments": digest(moments(optimizer)),
            "generators": generators(),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"rank{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    trainmover.run(main)
