"""Bring an optimizer's state to the entries of a manifest, with zeros for contents.

A joiner's optimizer may have no state yet (it never stepped) or too much (it took rehearsal
steps). Decides only which tensors exist; their values come from the transfer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainmover.errors import StateMismatch
from trainmover.state.codec import dtype_named
from trainmover.state.manifest import StateEntry, StateManifest
from trainmover.state.slots import OptimizerSlots
from trainmover.state.tensors import local_tensor


def conform_optimizer(slots: OptimizerSlots, manifest: StateManifest) -> None:
    """Create and drop state tensors of one optimizer.

    Raises:
        StateMismatch: The manifest has state for a parameter this optimizer doesn't have.
    """
    wanted: dict[str, dict[str, StateEntry]] = {}
    for entry in manifest.entries:
        place = slots.split(entry.name) if entry.kind == "optimizer" else None
        if place is not None:
            wanted.setdefault(place[0], {})[place[1]] = entry
    for name, parameter in slots.parameters():
        _conform_parameter(slots, parameter, wanted.pop(name, {}))
    for name in wanted:
        raise StateMismatch(f"{slots.name} has state for {name} where it comes from, not here")


def _conform_parameter(
    slots: OptimizerSlots, parameter: torch.Tensor, wanted: dict[str, StateEntry]
) -> None:
    state = slots.optimizer.state
    if not wanted and parameter not in state:
        return
    values: dict[str, Any] = state[parameter]
    unwanted = [k for k, v in values.items() if isinstance(v, torch.Tensor) and k not in wanted]
    for key in unwanted:
        del values[key]
    for key, entry in wanted.items():
        if not _fits(values.get(key), entry):
            values[key] = _zeros(parameter, entry)
    if not values:
        del state[parameter]


def _fits(value: object, entry: StateEntry) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    local = local_tensor(value)
    return (
        tuple(local.shape) == entry.shape
        and local.dtype == dtype_named(entry.dtype)
        and local.device.type == entry.device
        and isinstance(value, DTensor) == entry.is_sharded
    )


def _zeros(parameter: torch.Tensor, entry: StateEntry) -> torch.Tensor:
    dtype = dtype_named(entry.dtype)
    own = local_tensor(parameter)
    is_like_parameter = tuple(own.shape) == entry.shape and entry.device == own.device.type
    if entry.is_sharded:
        if not (isinstance(parameter, DTensor) and is_like_parameter):
            raise StateMismatch(f"{entry.name} is sharded where it comes from; it can't be here")
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if is_like_parameter:
        # Same strides as the parameter, as optimizers make it: kernels may sum in memory order.
        return torch.zeros_like(own, dtype=dtype, requires_grad=False)
    device = own.device if entry.device == own.device.type else torch.device(entry.device)
    return torch.zeros(entry.shape, dtype=dtype, device=device)
