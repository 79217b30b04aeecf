"""Stages of the model on different ranks, with torch.distributed.pipelining.

Decides how blocks are dealt out to stages, and stages to ranks:

    pp    `--stages` ranks in a pipeline, replicated over the others by DDP
    3d    each stage's blocks also split over `--tensor` ranks, replicated by FSDP2

`--schedule interleaved` gives each rank two stages; `--split 3,1` deals blocks out unevenly.

Shapes: B batch of a microbatch, T tokens, C width.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)
from torch.nn.parallel import DistributedDataParallel

from gpt.data import Share
from gpt.layouts import Layout, compile_blocks, must_divide, split_block, whole_model
from gpt.model import BYTE_VALUES, Stage, loss_of


class Pipeline(Layout):
    """This rank's stages, and the schedule that runs them."""

    can_clip_and_scale = False

    def __init__(self, args: argparse.Namespace, device_type: str) -> None:
        tensor = args.tensor if args.parallel == "3d" else 1
        ranks = dist.get_world_size()
        must_divide("--stages", args.stages * tensor, ranks)
        self.replicas = ranks // (args.stages * tensor)
        self.mesh = init_device_mesh(
            device_type,
            (args.stages, self.replicas, 1, tensor),
            mesh_dim_names=("stage", "replicate", "shard", "tensor"),
        )
        self.place = self.mesh.get_local_rank("stage")
        self.share = Share(self.mesh.get_local_rank("replicate"), self.replicas)
        parts = dealt_out(args)
        whole = whole_model(args, is_split_by_head=tensor > 1)
        own = range(self.place, len(parts), args.stages)
        self.stages = {
            index: self._built(args, Stage(whole, parts[index]).to(device_type)) for index in own
        }
        super().__init__(args, nn.ModuleList(self.stages.values()), device_type)
        self.has_last = len(parts) - 1 in self.stages
        self.losses: list[torch.Tensor] = []
        self.schedule = self._schedule(len(parts))

    @property
    def seed(self) -> int:
        """Ranks that split one stage's blocks drop out alike."""
        assert self.share is not None
        seed: int = self.args.seed + self.share.index * self.args.stages + self.place
        return seed

    def _built(self, args: argparse.Namespace, stage: Stage) -> nn.Module:
        for block in stage.blocks.values():
            if args.parallel == "3d":
                split_block(block, self.mesh["tensor"])
        compile_blocks(args, stage.blocks.values())
        if self.replicas == 1:
            return stage
        if args.parallel == "pp":
            return DistributedDataParallel(stage, process_group=self._group("replicate"))
        mesh: DeviceMesh = self.mesh["replicate", "shard"]
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(stage, mesh=mesh)
        return stage

    def _group(self, name: str) -> dist.ProcessGroup:
        return self.mesh[name].get_group()

    def _schedule(self, count: int) -> Any:
        stages: list[Any] = [self._stage(index, count) for index in self.stages]
        if self.args.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, self.args.microbatches, loss_fn=loss_of)
        return Schedule1F1B(stages[0], self.args.microbatches, loss_fn=loss_of)

    def _stage(self, index: int, count: int) -> PipelineStage:
        args = self.args
        batch = args.batch // args.microbatches
        between = torch.empty(
            batch, args.sequence, args.width, device=self.device_type, requires_grad=True
        )
        first = torch.zeros(batch, args.sequence, dtype=torch.int64, device=self.device_type)
        last = torch.empty(batch, args.sequence, BYTE_VALUES, device=self.device_type)
        shapes: dict[str, Any] = {}
        if args.shapes == "given":  # else stages send each other pickled shapes in the first step
            shapes["input_args"] = (first if index == 0 else between,)
            shapes["output_args"] = (last if index == count - 1 else between,)
        return PipelineStage(
            self.stages[index],
            index,
            count,
            torch.device(self.device_type),
            group=self._group("stage"),
            **shapes,
        )

    def gradients(self, window: torch.Tensor, scaler: Any) -> torch.Tensor:
        """One pass of the schedule; the loss is known at the end of the pipeline only."""
        inputs = (window[:, :-1],) if self.place == 0 else ()
        target = window[:, 1:] if self.has_last else None
        self.losses.clear()
        # Only the last stage may be given a list to fill.
        losses = self.losses if self.has_last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if not self.has_last:
            return torch.zeros((), device=self.device_type)
        return torch.stack([loss.detach() for loss in self.losses]).mean()

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Mean over the ranks that have one."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        count = dist.get_world_size() // self.args.stages
        mean: torch.Tensor = total / count
        return mean


def dealt_out(args: argparse.Namespace) -> list[range]:
    """The blocks of each stage."""
    count = args.stages * (2 if args.schedule == "interleaved" else 1)
    sizes = [int(size) for size in args.split.split(",")] if args.split else []
    if not sizes:
        must_divide("--stages and --schedule", count, args.layers)
        sizes = [args.layers // count] * count
    if len(sizes) != count or sum(sizes) != args.layers or min(sizes) < 1:
        raise SystemExit(f"--split: expected {count} numbers that add up to {args.layers}")
    must_divide("--microbatches", args.microbatches, args.batch)
    ends = [sum(sizes[: index + 1]) for index in range(count)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
