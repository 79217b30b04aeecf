"""Ranks' states made of plain bytes, for tests of the checkpoint room; no torch.

Decides small shapes that have every oddity: scalars, empty tensors, odd lengths before wide types,
parts that don't divide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from trainmover.checkpoint.commit import CommitOptions, commit
from trainmover.checkpoint.failures import Retries
from trainmover.checkpoint.local_store import LocalStore
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.safetensors_format import element_bytes
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed
from trainmover.checkpoint.writer import WriteOptions, write_rank
from trainmover.protocol.snapshot_image import ImageEntry

QUICK = Retries(attempts=3, first_wait_s=0.0)
RUN = "run-a"


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of the sample job, cut along its first dimension where it is sharded."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    kind: str = "parameter"
    is_sharded: bool = False


TENSORS = (
    Tensor(name="model.flags", dtype="bool", shape=(3,), kind="buffer"),
    Tensor(name="model.weight", shape=(6, 5), is_sharded=True),
    Tensor(name="model.half", dtype="bfloat16", shape=(7, 3), is_sharded=True),
    Tensor(name="model.empty", shape=(0, 4)),
    Tensor(name="optimizer.step", shape=(), kind="optimizer"),
    Tensor(
        name="optimizer.moment", dtype="float64", shape=(6, 5), kind="optimizer", is_sharded=True
    ),
    Tensor(name="fourier", dtype="complex64", shape=(2, 2), kind="object"),
    Tensor(name="wide", dtype="complex128", shape=(3,), kind="object"),
    Tensor(name="count", dtype="int64", shape=(1, 17), kind="buffer"),
)


def whole_bytes(tensor: Tensor, step: int) -> bytes:
    """The whole tensor's bytes at a step; a pure function of name and step."""
    size = prod(tensor.shape) * element_bytes(tensor.dtype, tensor.name)
    return random.Random(f"{tensor.name} {step}").randbytes(size)


def part(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """First row and count of rows that a rank holds, as torch cuts: by ceiling division."""
    if not tensor.is_sharded:
        return 0, tensor.shape[0] if tensor.shape else 1
    chunk = -(-tensor.shape[0] // world_size)
    first = min(rank * chunk, tensor.shape[0])
    return first, min(chunk, tensor.shape[0] - first)


def make(
    rank: int = 0,
    world_size: int = 1,
    step: int = 10,
    *,
    tensors: Sequence[Tensor] = TENSORS,
    **fields: object,
) -> tuple[RankState, memoryview]:
    """A rank's state and image; with gaps in the image, as an allocator leaves them."""
    image, entries = bytearray(), []
    for tensor in tensors:
        first, count = part(tensor, rank, world_size)
        row = prod(tensor.shape[1:]) * element_bytes(tensor.dtype, tensor.name)
        image += b"\xee" * (-len(image) % 64)
        data = whole_bytes(tensor, step)[first * row : (first + count) * row]
        shape = (count, *tensor.shape[1:]) if tensor.shape else ()
        entries.append(
            ImageEntry(
                name=tensor.name,
                kind=tensor.kind,
                dtype=tensor.dtype,
                shape=shape,
                offset=len(image),
                size_bytes=len(data),
                global_shape=tensor.shape,
                global_offset=(first, *[0] * (len(tensor.shape) - 1)) if tensor.shape else (),
                is_sharded=tensor.is_sharded,
            )
        )
        image += data
    identity = str(fields.pop("identity", f"part-{rank}"))
    state = RankState(
        rank=rank,
        world_size=world_size,
        step=step,
        lineage=int(str(fields.pop("lineage", 1))),
        generation=int(str(fields.pop("generation", 1))),
        identity=identity,
        entries=tuple(entries),
        personal=f"personal of {rank} at {step}".encode(),
        shared=f"shared at {step}".encode(),
        bulk_digest=1000 * step + (rank if identity == f"part-{rank}" else 0),
        run_id=str(fields.pop("run_id", RUN)),
        loss=(("loss", (1.0 / step).hex()),),
        is_suspect=bool(fields.pop("is_suspect", False)),
    )
    assert not fields, f"unknown: {fields}"
    return state, memoryview(image)


def local(path: Path) -> LocalStore:
    """A store that doesn't wait between attempts."""
    return LocalStore(path, retries=QUICK)


def save(
    store: Store,
    step: int,
    *,
    world_size: int = 2,
    term: int = 1,
    options: WriteOptions | None = None,
    **fields: object,
) -> Committed:
    """A whole save: every rank's shard, then the commit."""
    records = []
    for rank in range(world_size):
        state, image = make(rank, world_size, step, **fields)  # type: ignore[arg-type]
        records.append(write_rank(store, state, image, options=options))
    generation = records[0].generation
    return commit(
        store,
        records,
        Authority(term=term, generation=generation),
        options=CommitOptions(created_at=1000.0 + step),
    )
