"""How the model is spread over the ranks, one class for each way.

Decides which rank holds what, which part of the data it reads, and how gradients become complete
before the optimizer's step. A training loop only sees `Layout`.

    ddp, zero   the whole model on each rank; `zero` splits the optimizer's state and updates
    fsdp2, hsdp parameters sharded over all ranks, or over half of them in two replicas
    tp          each block's heads and MLP split over `--tensor` ranks
    moe         experts split over half of the ranks, the rest of the model everywhere
    pp, 3d      see `pipeline`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gpt.data import Share
from gpt.experts import ExpertBlock
from gpt.model import Block, ByteGPT

DECAY = 0.1


class Layout:
    """The whole model on this rank, replicated by DDP or sharded by FSDP2."""

    share: Share | None = None
    """Part of the data this rank reads; None: by rank, each its own."""
    can_clip_and_scale = True
    """Whether gradient clipping over `parameters()` and a GradScaler know all gradients."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, device_type: str) -> None:
        self.args = args
        self.model = model
        self.device_type = device_type

    @property
    def is_seeded_by_rank(self) -> bool:
        """Whether each rank draws its own dropout; else `seed` says which ranks draw alike."""
        return self.share is None

    @property
    def seed(self) -> int:
        """Equal on ranks that compute parts of one forward pass."""
        return int(self.args.seed) + (self.share.index if self.share is not None else 0)

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW over what this rank holds."""
        return torch.optim.AdamW(
            alike(self.model.parameters()), lr=self.args.rate, weight_decay=DECAY
        )

    def gradients(self, window: torch.Tensor, scaler: Any) -> torch.Tensor:
        """Forward and backward of this rank's batch; its loss."""
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.args.amp):
            loss: torch.Tensor = self.model(window[:, :-1], window[:, 1:])
        scaler.scale(loss).backward()
        return loss

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the global batch; a collective, so it stands before the optimizer's step."""
        return mean_over_ranks(loss)


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """Mean of a value that each rank has."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def alike(parameters: Iterable[nn.Parameter]) -> Any:
    """Parameter groups of tensors of one kind: an optimizer updates those of a group together."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


class Zero(Layout):
    """DDP with the optimizer's state split over half of the ranks, in two replicas.

    Each rank updates its part of the parameters and broadcasts it to its half: collectives inside
    `optimizer.step()`, behind the gate.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module, device_type: str) -> None:
        super().__init__(args, model, device_type)
        mesh = in_two_replicas(device_type) if dist.get_world_size() > 2 else None
        self.group = None if mesh is None else mesh["shard"].get_group()

    def optimizer(self) -> torch.optim.Optimizer:
        """ZeRO stage 1."""
        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=self.group,
            lr=self.args.rate,
            weight_decay=DECAY,
        )


class Tensor(Layout):
    """Each block's heads and MLP split over neighbouring ranks, replicated over the others."""

    can_clip_and_scale = False

    def __init__(self, args: argparse.Namespace, device_type: str) -> None:
        parts, ranks = args.tensor, dist.get_world_size()
        must_divide("--tensor", parts, ranks)
        mesh = init_device_mesh(
            device_type, (ranks // parts, 1, parts), mesh_dim_names=("replicate", "shard", "tensor")
        )
        self.share = Share(mesh.get_local_rank("replicate"), ranks // parts)
        model = whole_model(args, is_split_by_head=True).to(device_type)
        for block in model.blocks:
            split_block(block, mesh["tensor"])
        compile_blocks(args, model.blocks)
        if ranks > parts:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["replicate", "shard"])
            fully_shard(model, mesh=mesh["replicate", "shard"])
        super().__init__(args, model, device_type)


class MixtureOfExperts(Layout):
    """Experts over one half of the ranks, and again over the other; all else on every rank."""

    can_clip_and_scale = False

    def __init__(self, args: argparse.Namespace, device_type: str) -> None:
        torch.manual_seed(args.seed)
        blocks: list[nn.Module] = [
            ExpertBlock(args.width, args.heads, args.experts) for _ in range(args.layers)
        ]
        model = ByteGPT(blocks, args.width, args.sequence).to(device_type)
        ranks = dist.get_world_size()
        mesh = in_two_replicas(device_type) if ranks > 2 else None
        group = dist.group.WORLD if mesh is None else mesh["shard"].get_group()
        assert group is not None
        must_divide("--experts", dist.get_world_size(group), args.experts)
        held: set[nn.Parameter] = set()
        for block in blocks:
            assert isinstance(block, ExpertBlock)
            block.experts.keep_own(group)
            held.update(block.experts.held.parameters())
        self.replicas = None if mesh is None else mesh["replicate"].get_group()
        self.held = [parameter for parameter in model.parameters() if parameter in held]
        self.everywhere = [parameter for parameter in model.parameters() if parameter not in held]
        compile_blocks(args, blocks)
        super().__init__(args, model, device_type)

    def gradients(self, window: torch.Tensor, scaler: Any) -> torch.Tensor:
        """The experts' gradients hold all tokens of their half, the others' those of this rank."""
        loss = super().gradients(window, scaler)
        sum_gradients(self.everywhere, dist.group.WORLD)
        sum_gradients(self.held, self.replicas)
        return loss


def sum_gradients(parameters: list[nn.Parameter], group: Any) -> None:
    """Sum over `group` (None: this rank alone), as a mean over the job's ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if group is not None:
        dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


# ------------------------------------------------------------------------------------- building


def whole_model(args: argparse.Namespace, *, is_split_by_head: bool = False) -> ByteGPT:
    """The model, built alike on all ranks."""
    torch.manual_seed(args.seed)
    blocks: list[nn.Module] = [
        Block(args.width, args.heads, is_split_by_head=is_split_by_head) for _ in range(args.layers)
    ]
    return ByteGPT(blocks, args.width, args.sequence)


def compile_blocks(args: argparse.Namespace, blocks: Iterable[nn.Module]) -> None:
    """`torch.compile` for every block, if asked for."""
    if args.compile:
        for block in blocks:
            block.compile(backend=args.compiler)


def split_block(block: nn.Module, mesh: DeviceMesh) -> None:
    """Heads and MLP rows over the ranks of `mesh`; two all-reduces forward, two backward."""
    parallelize_module(
        block,
        mesh,
        {
            "query_key_value": ColwiseParallel(),
            "project": RowwiseParallel(),
            "widen": ColwiseParallel(),
            "narrow": RowwiseParallel(),
        },
    )


def must_divide(name: str, part: int, whole: int) -> None:
    """Refuse sizes that do not fit, in one line."""
    if part < 1 or whole % part:
        raise SystemExit(f"{name}: {part} does not divide {whole}")


def in_two_replicas(device_type: str) -> DeviceMesh:
    """Two halves of the ranks."""
    ranks = dist.get_world_size()
    if ranks % 2:
        raise SystemExit(f"this layout needs an even number of ranks, there are {ranks}")
    return init_device_mesh(device_type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))


def build_model(args: argparse.Namespace, device_type: str) -> nn.Module:
    """The model replicated (ddp, zero) or sharded (fsdp2, hsdp)."""
    model = whole_model(args).to(device_type)
    compile_blocks(args, model.blocks)
    if args.parallel in ("ddp", "zero"):
        return DistributedDataParallel(model)
    if args.parallel == "hsdp":
        mesh = in_two_replicas(device_type)
    else:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
