"""A model made of shapes and ties that are easily lost: 0-dim, empty, transposed, tied, shared.

Fails by itself, on every rank and in every step, if a tie or a view is one no more.

    trainmover run --machines 2 tests/cases/odd.py --steps 40 --final DIR/final.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainmover
from tests.holding import Hold

WIDTH = 6
WORDS = 7


class Odd(nn.Module):
    """[B] int64 -> [B, WORDS] float."""

    def __init__(self, *, has_ties: bool) -> None:
        super().__init__()
        self.has_ties = has_ties
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor([1.0]) if not has_ties else torch.tensor(1.0))
        # FSDP takes no empty tensor; of this one all ranks but the first hold an empty shard.
        self.empty = nn.Parameter(torch.zeros(0 if has_ties else 1, 4))
        self.row = nn.Parameter(torch.randn(1, 17))
        turned = torch.randn(WIDTH, 17).t()  # FSDP wants it contiguous
        self.turned = nn.Parameter(turned if has_ties else turned.contiguous())
        self.short = nn.Parameter(torch.randn(3, WIDTH))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("count", torch.tensor(0))
        if has_ties:
            self.out.weight = self.embedding.weight
            self.again = self.embedding
            flat = torch.randn(2 * WIDTH)
            self.low, self.high = nn.Parameter(flat[:WIDTH]), nn.Parameter(flat[WIDTH:])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words) * self.scale + self.short.sum(0)
        hidden = torch.tanh(hidden + self.row @ self.turned + self.empty.sum())
        if self.has_ties:
            hidden = hidden * self.low + self.high
        self.count += 1
        logits: torch.Tensor = self.out(hidden)
        return logits

    def check(self) -> None:
        """Ties are storage, not equal values."""
        if not self.has_ties:
            return
        assert self.out.weight is self.embedding.weight is self.again.weight
        assert self.high.data_ptr() - self.low.data_ptr() == 4 * WIDTH
        assert self.turned.stride() == (1, 17)


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--spread", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--pace", type=float, default=0.05)
    parser.add_argument("--final", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(4)
    net = Odd(has_ties=args.spread == "ddp")
    model: Any = DistributedDataParallel(net) if args.spread == "ddp" else fully_shard(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = job.batches(lambda: torch.randint(0, WORDS, (5,)))
    job.seed(4)
    job.track(model=model, optimizer=optimizer)
    hold = Hold()
    for step in job.steps(args.steps):
        with step:
            time.sleep(args.pace)
            words = next(batches)
            loss = nn.functional.cross_entropy(model(words), (words + 1) % WORDS)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            step.log(loss=mean)
            optimizer.step()
            optimizer.zero_grad()
            net.check()
        hold.behind(step, job.rank)
    write_final(job, args.final, digest_of(model, optimizer))


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of this rank's part of parameters, buffers and moments."""
    found = xxhash.xxh3_64()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            found.update(local(tensor).detach().contiguous().numpy().tobytes())
    for buffer in model.buffers():
        found.update(buffer.numpy().tobytes())
    return found.intdigest() >> 1


def write_final(job: trainmover.Job, path: Path, digest: int) -> None:
    """Every rank's digest, written by the primary."""
    own = torch.tensor([digest])
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    if job.is_primary:
        path.write_text(json.dumps({"digests": [f"{int(d.item()):016x}" for d in digests]}))


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return found


if __name__ == "__main__":
    trainmover.run(main)
