"""What a run leaves behind: a line for each loss, and a digest of the final state of each rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import trainmover


class LossFile:
    """Appends each committed step's loss to a file, exactly once, whoever is primary.

    The last two losses are tracked state, noted before the gate. If the primary dies after the
    gate and before it has written, its successor finds the line missing and adds it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.recent: list[list[Any]] = []
        self.written = -1

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [list(entry) for entry in self.recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = [list(entry) for entry in state["recent"]]

    def note(self, step: int, loss: torch.Tensor) -> None:
        """Before the gate: from here on the value is part of the state of version step + 1."""
        self.recent = [*self.recent[-1:], [step, float(loss).hex()]]

    def write(self) -> None:
        """After the gate, on the primary: the lines that the file does not have yet."""
        if self.path is None:
            return
        step = self.recent[-1][0]
        if step == 0:
            self.path.write_text("")
        elif self.written != step - 1:
            self.written = self._last_step()
        with self.path.open("a", encoding="utf-8") as file:
            for index, value in self.recent:
                if index > self.written:
                    file.write(json.dumps({"step": index, "loss": value}) + "\n")
        self.written = step

    def _last_step(self) -> int:
        assert self.path is not None
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else -1


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, buffers and the optimizer's tensors in a fixed order."""
    parameters = list(model.parameters())
    yield from parameters
    yield from model.buffers()
    steps = getattr(optimizer, "optim", optimizer)  # inside ZeroRedundancyOptimizer
    for parameter in parameters:
        state = steps.state.get(parameter, {})
        yield from (state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """63 bits over the bytes of every tensor that this rank holds."""
    sha = hashlib.sha256()
    for tensor in tensors_of(model, optimizer):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(sha.digest()[:8], "big") >> 1


def write_digests(job: trainmover.Job, path: Path, steps: int, digest: int) -> None:
    """One digest per rank, written by the primary."""
    own = torch.tensor([digest], device=job.device_type)
    all_digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, own)
    if job.is_primary:
        final = {"steps": steps, "digests": [f"{int(d.item()):016x}" for d in all_digests]}
        path.write_text(json.dumps(final) + "\n", encoding="utf-8")
