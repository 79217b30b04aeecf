"""Bulk state into and out of one block of memory, entry by entry.

Decides the order and the places of entries, and that a snapshot is one copy of each tensor and
nothing else: digests are taken later, by whoever keeps the bytes. Where the memory comes from, and
when a snapshot is taken, is the worker's.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import Any

import torch

from trainmover.errors import StateMismatch
from trainmover.protocol.snapshot_image import HEADER_BYTES, ImageEntry, aligned
from trainmover.state.inventory import Inventory
from trainmover.state.manifest import StateManifest
from trainmover.state.slots import shard_place
from trainmover.state.tensors import byte_copy, byte_view, local_tensor

ReadEntry = Callable[[ImageEntry, memoryview], None]
"""Fills a buffer with the bytes of one entry; called in the order of entries."""


def image_entries(inventory: Inventory) -> tuple[tuple[ImageEntry, ...], int]:
    """Every bulk entry with its place in an image, and the size of the bulk area."""
    entries = []
    end = 0
    for kind, name, tensor in inventory.live():
        local = local_tensor(tensor)
        place = shard_place(tensor)
        size = local.numel() * local.element_size()
        zeros = (0,) * local.dim()
        entries.append(
            ImageEntry(
                name=name,
                kind=kind,
                dtype=str(local.dtype).removeprefix("torch."),
                shape=tuple(local.shape),
                offset=end,
                size_bytes=size,
                global_shape=tuple(tensor.shape),
                global_offset=place.offset or zeros,
                is_sharded=local is not tensor,
            )
        )
        end = aligned(end + size)
    return tuple(entries), end


class ImageWriter:
    """Copies bulk state into one memory; keeps its views from one snapshot to the next."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._entries: tuple[ImageEntry, ...] = ()
        self._views: list[torch.Tensor] = []

    def write(self, inventory: Inventory, entries: tuple[ImageEntry, ...]) -> None:
        """One copy per tensor; `entries` are those of the inventory as it is now."""
        if entries != self._entries:
            self._views = [self._view(entry) for entry in entries]
            self._entries = entries
        tensors = [tensor.detach() for _, tensor in inventory.bulk()]
        with torch.no_grad():
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor)

    def _view(self, entry: ImageEntry) -> torch.Tensor:
        start = HEADER_BYTES + entry.offset
        flat = self._whole[start : start + entry.size_bytes]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if not entry.size_bytes:
            return torch.empty(entry.shape, dtype=dtype)
        return flat.view(dtype).view(entry.shape)


def load_entries(
    inventory: Inventory,
    manifest: StateManifest,
    entries: tuple[ImageEntry, ...],
    read: ReadEntry,
) -> int:
    """Put an image's bulk into the tracked tensors, in place; bytes loaded.

    After an exception the contents of the tensors are undefined.

    Raises:
        StateMismatch: Structure differs; the first difference is named.
    """
    inventory.conform(manifest)
    live = inventory.bulk()
    if [name for name, _ in live] != [entry.name for entry in entries]:
        raise StateMismatch(f"{len(entries)} entries in the snapshot do not name what is tracked")
    total = 0
    for (name, tensor), entry in zip(live, entries, strict=True):
        if tuple(tensor.shape) != entry.shape or entry.size_bytes != _bytes_of(tensor):
            raise StateMismatch(f"{name} is {list(tensor.shape)} here, {list(entry.shape)} there")
        total += entry.size_bytes
        if entry.size_bytes:
            _load(tensor, entry, read)
    return total


def _load(tensor: torch.Tensor, entry: ImageEntry, read: ReadEntry) -> None:
    view: Any = byte_view(tensor)
    if view is not None:
        read(entry, view)
        return
    # Not one block of CPU memory: through a copy of this one entry.
    staging = torch.empty(tensor.shape, dtype=tensor.dtype)
    read(entry, byte_copy(staging))
    with torch.no_grad():
        tensor.detach().copy_(staging)


def _bytes_of(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
