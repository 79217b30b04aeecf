"""A manifest of another number of ranks, as this rank would have written it.

Decides only the shapes of what this rank must create before it is filled: optimizer state that is
sharded like its parameter has the shape that the parameter has here.
"""

from __future__ import annotations

import math

import msgspec
import torch

from trainmover.state.inventory import Inventory
from trainmover.state.manifest import StateEntry, StateManifest
from trainmover.state.slots import shard_place
from trainmover.state.tensors import local_tensor


def resized(inventory: Inventory, manifest: StateManifest) -> StateManifest:
    """`manifest` with local shapes and places of this rank."""
    here = {entry.name: entry for entry in inventory.manifest().entries}
    parameters = dict(inventory.parameters())
    entries = []
    offset = 0
    for entry in manifest.entries:
        known = here.get(entry.name)
        if known is not None:
            fitted = known
        else:
            fitted = _like_parameter(entry, parameters)
        entries.append(msgspec.structs.replace(fitted, offset=offset))
        offset += fitted.size_bytes
    return msgspec.structs.replace(manifest, identity=inventory.identity, entries=tuple(entries))


def _like_parameter(entry: StateEntry, parameters: dict[str, torch.Tensor]) -> StateEntry:

    place = entry.name.partition(".state[")[2].rpartition("].")
    parameter = parameters.get(place[0])
    if not entry.is_sharded or parameter is None:
        return entry
    local = local_tensor(parameter)
    item_bytes = entry.size_bytes // max(1, math.prod(entry.shape))
    return msgspec.structs.replace(
        entry,
        shape=tuple(local.shape),
        size_bytes=local.numel() * (item_bytes or local.element_size()),
        global_offset=shard_place(parameter).offset,
    )
