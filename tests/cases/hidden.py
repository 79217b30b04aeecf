"""A script whose learning rate and loss scale hang on counters that nobody sees.

trainmover run tests/cases/hidden.py --out DIR --steps 20 --schedule sequential
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import lr_scheduler

import trainmover

TOTAL = 40


def sequential(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """Warm-up, then cosine, each with its own counter, chained with a third."""
    warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
    return lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[6])


SCHEDULES = {
    "sequential": sequential,
    "onecycle": lambda optimizer, total: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=total
    ),
}


class Scale:
    """Grows after three good updates in a row; what it counts is private."""

    def __init__(self) -> None:
        self.value = 8.0
        self._good = 0
        self._seen = 0

    def update(self, loss: float) -> None:
        self._seen += 1
        self._good = 0 if loss > 1.2 else self._good + 1
        if self._good == 3:
            self.value, self._good = self.value * 2, 0
        if self._seen % 7 == 0:
            self.value /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self._good, "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good, self._seen = state["value"], state["good"], state["seen"]


@dataclass
class Place:
    name: str = "here"


UNSAFE: dict[str, Any] = {"path": Path("/here"), "dataclass": Place(), "lambda": lambda: 1}


class Unsafe(Scale):
    """Keeps something that only a pickle could hold."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self._what = what

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "whereabouts": self._what}


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="sequential")
    parser.add_argument("--total", type=int, default=TOTAL, help="length of the schedule")
    parser.add_argument("--unsafe", choices=tuple(UNSAFE), default="")
    parser.add_argument("--hold", type=int, default=-1, help="stay behind this step until killed")
    args = parser.parse_args()
    job.seed(7)
    torch.manual_seed(7)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[args.schedule](optimizer, args.total)
    scale = Unsafe(UNSAFE[args.unsafe]) if args.unsafe else Scale()
    job.track(model=model, optimizer=optimizer, schedule=schedule, scale=scale)
    for step in job.steps(args.steps):
        with step:
            inputs = torch.randn(16, 8)
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
            (loss * scale.value).backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad / scale.value
            step.log(loss=loss)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            schedule.step()
            scale.update(loss.item())
            optimizer.zero_grad()
            line = {
                "step": step.index,
                "loss": loss.item().hex(),
                "rate": float(rate).hex(),
                "scale": scale.state_dict() if not args.unsafe else {},
                "parameters": digest(model),
            }
            step.after(lambda line=line: write(args.out, line))
        while step.index == args.hold:
            time.sleep(0.01)


def digest(model: nn.Module) -> str:
    found = xxhash.xxh3_64()
    for tensor in model.parameters():
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def write(folder: Path, line: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rank0.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    trainmover.run(main)
