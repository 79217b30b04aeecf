"""Who would read what if a checkpoint were restored at some world size.

Decides whether a world size can be served from the checkpoint alone, and says whether the numbers
stay the same. The tensors' parts themselves come from the job's own layout when it restores: any
part of any tensor can be read (`Checkpoint.assemble`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from trainmover.checkpoint.manifest import FileRecord, LayoutEntry
from trainmover.checkpoint.reader import Checkpoint
from trainmover.checkpoint.safetensors_format import Piece, element_bytes
from trainmover.checkpoint.slices import Box
from trainmover.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """One rank of the restored job."""

    rank: int
    personal_of: int | None
    """Rank whose place it takes; None: it has had none (C78)."""
    files: tuple[str, ...]
    read_bytes: int
    """Bytes of tensors read from these files."""
    state_bytes: int
    """Bytes of tensors it has afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePlan:
    """A whole restored job."""

    world_size: int
    how: str
    """`same`: every rank as it was; `replicas`: the same shards on more or fewer ranks; `cut`:
    tensors are cut anew; `layout`: the job must bring its layout."""
    is_exact: bool
    """Whether the continued run has the bits of one that had not stopped."""
    ranks: tuple[RankPlan, ...]
    notes: tuple[str, ...]


def plan_restore(checkpoint: Checkpoint, world_size: int | None = None) -> RestorePlan:
    """Who reads what at `world_size`; None: the saved one. Raises CheckpointError, ConfigError."""
    manifest = checkpoint.manifest
    saved = manifest.world_size
    wanted = saved if world_size is None else world_size
    if wanted < 1:
        raise ConfigError(f"--world-size: expected at least 1, got {wanted}")
    if wanted == saved:
        ranks = tuple(_as_saved(checkpoint, rank, rank) for rank in range(saved))
        return RestorePlan(world_size=wanted, how="same", is_exact=True, ranks=ranks, notes=())
    notes = [
        f"saved with {saved} ranks: the state is equal, the numbers after it need not be",
        "random generators that differ by rank are seeded anew from the saved ones; what is left "
        "of an epoch is dealt out anew",
    ]
    if _can_be_cut(checkpoint):
        ranks = tuple(_cut_anew(checkpoint, rank, wanted) for rank in range(wanted))
        how = "cut"
    elif _keeps_shards(checkpoint, wanted):
        ranks = tuple(_as_saved(checkpoint, rank, rank % saved) for rank in range(wanted))
        how = "replicas"
        notes.append("the same shards, taking replication for the outermost dimension of the mesh")
    else:
        ranks, how = (), "layout"
        notes.append(
            "tensors are cut along several dimensions or spread over stages: the number of ranks "
            "alone does not tell the new layout; any layout can be restored, by the job itself"
        )
    return RestorePlan(world_size=wanted, how=how, is_exact=False, ranks=ranks, notes=tuple(notes))


def _as_saved(checkpoint: Checkpoint, rank: int, source: int) -> RankPlan:
    manifest = checkpoint.manifest
    size = checkpoint.rank_state(source).image_bytes
    return RankPlan(
        rank=rank,
        personal_of=rank if rank < manifest.world_size else None,
        files=tuple(file.path for file in manifest.files_of(source)),
        read_bytes=size,
        state_bytes=size,
    )


def _can_be_cut(checkpoint: Checkpoint) -> bool:
    """True if tensors are whole or cut along their first dimension, all on every rank."""
    manifest = checkpoint.manifest
    if any(prod(entry.grid[1:]) > 1 for entry in manifest.layout):
        return False
    names = {entry.name for entry in manifest.layout}
    holders = sorted({record.bulk_rank for record in manifest.ranks})
    return all({e.name for e in checkpoint.rank_state(r).entries} == names for r in holders)


def _keeps_shards(checkpoint: Checkpoint, wanted: int) -> bool:
    """True if ranks 0 to wanted - 1, repeated from the saved ones, hold every shard equally."""
    records = checkpoint.manifest.ranks
    every = {record.identity for record in records}
    counts = dict.fromkeys(sorted(every), 0)
    for rank in range(wanted):
        counts[records[rank % len(records)].identity] += 1
    return min(counts.values()) > 0 and len(set(counts.values())) == 1


def _cut_anew(checkpoint: Checkpoint, rank: int, world_size: int) -> RankPlan:
    files: dict[str, None] = {}
    read = state = 0
    for entry in checkpoint.manifest.layout:
        box = _part(entry, rank, world_size)
        state += box.element_count * element_bytes(entry.dtype, entry.name)
        for file, piece in _touched(checkpoint.files_for(entry.name), box):
            files[file.path] = None
            read += piece.size_bytes
    return RankPlan(
        rank=rank,
        personal_of=rank if rank < checkpoint.manifest.world_size else None,
        files=tuple(files),
        read_bytes=read,
        state_bytes=state,
    )


def _part(entry: LayoutEntry, rank: int, world_size: int) -> Box:
    """The rows of a rank, cut as torch cuts; the whole tensor where it is not sharded."""
    shape = entry.global_shape
    if not shape or prod(entry.grid) == 1:
        return Box((0,) * len(shape), shape)
    chunk = -(-shape[0] // world_size)
    first = min(rank * chunk, shape[0])
    rows = min(chunk, shape[0] - first)
    return Box((first, *[0] * (len(shape) - 1)), (rows, *shape[1:]))


def _touched(
    placed: Iterable[tuple[FileRecord, Piece]], box: Box
) -> list[tuple[FileRecord, Piece]]:
    return [
        (file, piece)
        for file, piece in placed
        if Box(piece.global_offset, piece.shape).shared(box) is not None
    ]
