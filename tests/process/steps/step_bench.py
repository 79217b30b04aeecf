"""What all kinds of step have in common: a small network, data, and the record of a rank."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

OUT = "STEP_KINDS_OUT"
STEPS = 8


class Bench:
    """What the kinds have in common: a small network, data, and the record of a rank."""

    def __init__(self, job: trainmover.Job) -> None:
        self.job = job
        self.history: trainmover.Value[list[str]] = trainmover.Value([])
        self.optimizers: list[torch.optim.Optimizer] = []
        self.nets: list[nn.Module] = []
        self.behind_gate: Callable[[int], object] = int
        self.does_reduce_behind = False
        self.before_evaluation: Callable[[], object] = int
        torch.manual_seed(3)

    def net(self, *, has_norm: bool = False, inputs: int = 8) -> nn.Sequential:
        norm = [nn.BatchNorm1d(16)] if has_norm else []
        made = nn.Sequential(
            nn.Linear(inputs, 16), *norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(),
            nn.Linear(16, 1),
        )  # fmt: skip
        self.nets.append(made)
        return made

    def ddp(
        self, net: nn.Module, bucket_cap_mb: float | None = 0.001, **more: Any
    ) -> DistributedDataParallel:
        return DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb, **more)

    def sharded(self, net: nn.Sequential, dimensions: int = 1) -> nn.Module:
        size = self.job.world_size
        shape = (size,) if dimensions == 1 else (2, size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-dimensions:])
        for layer in net:
            if isinstance(layer, nn.Linear) and layer.out_features > 1:
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def adam(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=1e-2)
        self.optimizers.append(made)
        return made

    def batches(self, workers: int = 0) -> Any:
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(x, x.sum(1, keepdim=True))
        sampler: Any = DistributedSampler(data, num_replicas=self.job.world_size)
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
        made = self.job.batches(loader)
        self.job.seed(7)
        return made

    def note(self, value: torch.Tensor | float) -> None:
        self.history.value = [*self.history.value, float(torch.as_tensor(value).detach()).hex()]

    def track(self, **objects: object) -> None:
        self.job.track(history=self.history, **objects)

    def finish(self) -> None:
        """What this rank has in the end, by means of this script alone."""
        found = hashlib.sha256()
        for tensor in self._tensors():
            local = getattr(tensor, "to_local", lambda tensor=tensor: tensor)()
            found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        drawn = [torch.rand(()).item(), random.random()]
        told = {"history": self.history.value, "state": found.hexdigest(), "drawn": drawn}
        path = Path(os.environ[OUT]) / f"rank{self.job.rank}.json"
        path.write_text(json.dumps(told))

    def _tensors(self) -> Iterable[Any]:
        for net in self.nets:
            yield from net.parameters()
            yield from net.buffers()
        for optimizer in self.optimizers:
            # By parameter: the order of the state's table depends on who made it.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    items = sorted(optimizer.state.get(parameter, {}).items())
                    yield from (value for _, value in items if isinstance(value, torch.Tensor))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return ((model(x) - y) ** 2).mean()
