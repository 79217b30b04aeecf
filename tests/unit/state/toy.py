"""A small training step with everything a step usually has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainmover.state.inventory import Inventory
from trainmover.state.undo import UndoSet
from trainmover.state.value import Value

WORDS, WIDTH, LENGTH, ROWS = 50, 16, 4, 8


class Toy(nn.Module):
    """Tied embedding, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(LENGTH * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.embedding(words).flatten(1))
        return self.head(self.drop(torch.relu(self.norm(hidden))))


class Average:
    """A moving average of weights that is not a module."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


@dataclass
class Run:
    """One training process's objects."""

    seed: int = 0
    keeps_gradients: bool = False
    inf_every: int = 0
    micro_steps: int = 2
    losses: list[float] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = Toy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.average = Average(self.model)
        self.best: Value[float] = Value(1e9)
        self.inventory = Inventory(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "scaler": self.scaler,
                "average": self.average,
                "best": self.best,
            }
        )
        self.undo = UndoSet(self.inventory, [])

    def before_gate(self) -> float:
        """Forward, backward, unscale, clip."""
        total = 0.0
        for _ in range(self.micro_steps):
            words = torch.randint(WORDS, (ROWS, LENGTH))
            loss = nn.functional.cross_entropy(self.model(words), words[:, 0])
            if self.inf_every and self.count % self.inf_every == 0:
                loss = loss * float("inf")
            self.scaler.scale(loss / self.micro_steps).backward()
            total += loss.item()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return total

    def after_gate(self, loss: float) -> None:
        """Update and everything behind it."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.average.update(self.model)
        self.best.value = min(self.best.value, loss)
        self.losses.append(loss)
        self.count += 1

    def step(self) -> None:
        self.after_gate(self.before_gate())

    def everything(self) -> dict[str, Any]:
        """Digests of all that is tracked."""
        smalls = {name: self.inventory.small_digest(name) for name in self.inventory.small_names}
        return {**self.inventory.bulk_digests(), **smalls}
