"""Whole tensors in stock safetensors files, for people who load them elsewhere.

Decides the form: `model.safetensors`, or several files and `model.safetensors.index.json` as other
tools write and read them. Dtypes are never changed. One tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import msgspec

from trainmover.checkpoint.manifest import LayoutEntry
from trainmover.checkpoint.reader import Checkpoint
from trainmover.checkpoint.safetensors_format import (
    Piece,
    element_bytes,
    in_file_order,
    make_header,
)
from trainmover.checkpoint.store import Store
from trainmover.errors import ConfigError

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What is exported."""

    kinds: frozenset[str] = frozenset({"parameter", "buffer"})
    """Kinds of tensors; the optimizer's are usually not wanted elsewhere."""
    strip_prefix: str = ""
    """Dropped from the names that begin with it: `model.`."""
    split_bytes: int = 5_000_000_000
    progress: Callable[[LayoutEntry], None] = field(default=lambda _: None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written."""

    files: tuple[str, ...]
    tensor_count: int
    size_bytes: int
    conflicts: tuple[str, ...]
    """Tensors that differ between ranks: the lowest rank's was taken."""


def export_safetensors(
    checkpoint: Checkpoint, destination: Store, options: ExportOptions | None = None
) -> Exported:
    """Gather every tensor and write it whole.

    Raises:
        ConfigError: Nothing to export, two tensors of one name, or the destination isn't empty.
        CheckpointError: Something can't be read or written.
    """
    chosen = options or ExportOptions()
    entries = [e for e in checkpoint.manifest.layout if e.kind in chosen.kinds]
    if not entries:
        there = sorted({e.kind for e in checkpoint.manifest.layout})
        raise ConfigError(f"nothing of kind {sorted(chosen.kinds)}; there are {there}")
    renamed = {_renamed(entry.name, chosen.strip_prefix): entry for entry in entries}
    if len(renamed) != len(entries):
        raise ConfigError(f"without '{chosen.strip_prefix}' two tensors have one name")
    if destination.exists():
        raise ConfigError(f"{destination.location} exists already; export into a new directory")
    destination.make_root()
    batches = list(_batches(renamed, chosen.split_bytes))
    total = len(batches)
    files: dict[str, list[str]] = {}
    for number, batch in enumerate(batches, 1):
        name = (
            "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        )
        _write(checkpoint, destination, name, batch, chosen.progress)
        files[name] = list(batch)
    size = sum(_size(entry) for entry in entries)
    if total > 1:
        where = {tensor: file for file, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
        destination.put(INDEX, msgspec.json.format(msgspec.json.encode(index), indent=1))
    conflicts = set(checkpoint.conflicts()) & {entry.name for entry in entries}
    return Exported(
        files=tuple(files),
        tensor_count=len(entries),
        size_bytes=size,
        conflicts=tuple(sorted(conflicts)),
    )


def _renamed(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)


def _size(entry: LayoutEntry) -> int:
    return prod(entry.global_shape) * element_bytes(entry.dtype, entry.name)


def _batches(entries: dict[str, LayoutEntry], split_bytes: int) -> Iterator[dict[str, LayoutEntry]]:
    batch: dict[str, LayoutEntry] = {}
    room = split_bytes
    for name, entry in entries.items():
        if batch and _size(entry) > room:
            yield batch
            batch, room = {}, split_bytes
        batch[name] = entry
        room -= _size(entry)
    yield batch


def _write(
    checkpoint: Checkpoint,
    destination: Store,
    file: str,
    batch: dict[str, LayoutEntry],
    progress: Callable[[LayoutEntry], None],
) -> None:
    pieces = in_file_order([_piece(name, entry) for name, entry in batch.items()])
    output = destination.create(file)
    try:
        output.write(memoryview(make_header(pieces, {"step": str(checkpoint.manifest.step)})))
        for piece in pieces:
            entry = batch[piece.name]
            origin: Sequence[int] = [0] * len(entry.global_shape)
            output.write(memoryview(checkpoint.assemble(entry.name, origin, entry.global_shape)))
            progress(entry)
        output.finish()
    except BaseException:
        output.abandon()
        raise


def _piece(name: str, entry: LayoutEntry) -> Piece:
    return Piece(
        name=name,
        kind=entry.kind,
        dtype=entry.dtype,
        shape=entry.global_shape,
        global_shape=entry.global_shape,
        global_offset=(0,) * len(entry.global_shape),
        is_sharded=False,
        begin=0,
        size_bytes=_size(entry),
        xxh3="",
    )
