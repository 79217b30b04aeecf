"""Where each bulk tensor lives: parameters, buffers, optimizer state, tensors of user objects.

Decides names and order of bulk entries and that memory reached twice is kept once. Slots read the
live tensor each time they are asked, because buffers are replaced by assignment and optimizer
state appears with the first step. Does not copy or compare anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from trainmover.errors import TrackError
from trainmover.state.tensors import local_tensor, storage_key

_WRAPPER_SEGMENTS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Slot:
    """One place a bulk tensor is read from.

    `read` gives None while the place is empty; `replace` puts another tensor there, where that is
    possible.
    """

    name: str
    kind: str
    read: Callable[[], torch.Tensor | None]
    replace: Callable[[torch.Tensor | None], None] | None = None


class SeenTensors:
    """Tensors that already have a name: the same object or the same memory is kept once."""

    def __init__(self) -> None:
        self._names: dict[object, str] = {}
        self._kept: list[torch.Tensor] = []

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name the tensor's memory was first seen under."""
        known = self._names.get(id(tensor))
        if known is None:
            known = self._names.get(storage_key(local_tensor(tensor)))
        return known

    def add(self, tensor: torch.Tensor, name: str) -> bool:
        """Give the tensor a name; False if it has one already."""
        if self.name_of(tensor) is not None:
            return False
        self._names[id(tensor)] = name
        self._names[storage_key(local_tensor(tensor))] = name
        self._kept.append(tensor)  # ids stay valid only while the object lives
        return True


def bare_module(module: nn.Module) -> nn.Module:
    """The user's module inside DDP, DataParallel and `torch.compile` wrappers."""
    while True:
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules:
            inner = module._modules["_orig_mod"]
            assert inner is not None
            module = inner
        else:
            return module


def clean_name(name: str) -> str:
    """A parameter's name without the segments that wrappers inside the model add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors whose bytes can't be captured.

    Raises:
        TrackError: Meta, uninitialised, sparse or quantised; the message names the tensor.
    """
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise TrackError(f"{name} is not initialised yet (lazy module); run one forward first")
    if tensor.is_meta:
        raise TrackError(f"{name} is on the meta device; call track() after initialisation")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TrackError(f"{name} is sparse or quantized ({tensor.layout}); it can't be captured")


def module_slots(owner: str, module: nn.Module, seen: SeenTensors) -> Iterator[Slot]:
    """Parameters, then buffers (also non-persistent ones) of a module, each once."""
    module = bare_module(module)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            # The root keeps its parameters gathered after a forward without backward.
            submodule.reshard()
    for name, parameter in module.named_parameters():
        full = f"{owner}.{clean_name(name)}"
        check_tensor(full, parameter)
        if seen.add(parameter, full):
            yield Slot(full, "parameter", _constant(parameter))
    for prefix, submodule in module.named_modules():
        for key in submodule._buffers:
            yield from _buffer_slot(f"{owner}.{prefix}" if prefix else owner, submodule, key, seen)


def _buffer_slot(owner: str, module: nn.Module, key: str, seen: SeenTensors) -> Iterator[Slot]:
    name = clean_name(f"{owner}.{key}")
    buffer = module._buffers[key]
    if buffer is not None:
        check_tensor(name, buffer)
        if not seen.add(buffer, name):
            return

    def read() -> torch.Tensor | None:
        return module._buffers.get(key)

    def replace(tensor: torch.Tensor | None) -> None:
        module._buffers[key] = tensor

    yield Slot(name, "buffer", read, replace)


def _constant(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


@dataclass(frozen=True)
class ShardPlace:
    """Where a local tensor sits in the whole one."""

    offset: tuple[int, ...]
    description: str


def shard_place(tensor: torch.Tensor) -> ShardPlace:
    """Global offset and placements of a DTensor; empty for a plain tensor.

    Replicating mesh dimensions leave no trace: ranks that differ only there are replicas.
    """
    if not isinstance(tensor, DTensor):
        return ShardPlace((), "")
    mesh = tensor.device_mesh
    # Not mesh.get_coordinate(): torch hands out cached tensor specs, and with them the mesh of an
    # earlier entry of `main`, with the coordinate of the rank the process played then.
    own = (mesh.mesh == mesh.get_rank()).nonzero()
    if len(own) == 0:
        return ShardPlace((), "not on this rank")
    _, offset = _compute_local_shape_and_global_offset(
        tensor.shape, mesh.shape, own[0].tolist(), tensor.placements
    )
    shards = [str(placement) for placement in tensor.placements if isinstance(placement, Shard)]
    return ShardPlace(tuple(offset), f"{tuple(tensor.shape)} {' '.join(shards)}")


class OptimizerSlots:
    """Bulk tensors of one optimizer, named by the parameter they belong to."""

    def __init__(self, name: str, optimizer: Optimizer, seen: SeenTensors) -> None:
        self.name = name
        self.optimizer = optimizer
        self._seen = seen
        self._prefix = f"{name}.state["

    def parameter_names(self) -> list[list[str]]:
        """Names of the parameters, group by group."""
        return [
            [self.parameter_name(parameter) for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def parameter_name(self, parameter: torch.Tensor) -> str:
        """The name under which the parameter was tracked."""
        name = self._seen.name_of(parameter)
        if name is None:
            raise TrackError(
                f"{self.name} got a parameter of shape {tuple(parameter.shape)} after track(); "
                "call track() when all parameter groups are there"
            )
        return name

    def own_parameters(self) -> Iterator[Slot]:
        """Parameters that no tracked module has; they become entries of their own."""
        for group_index, group in enumerate(self.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = f"{self.name}.params[{group_index}][{index}]"
                check_tensor(name, parameter)
                if self._seen.add(parameter, name):
                    yield Slot(name, "parameter", _constant(parameter))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter with its name, in the order of the groups."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield self.parameter_name(parameter), parameter

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Live state tensors: `optimizer.state[model.weight].exp_avg`."""
        state = self.optimizer.state
        if not state:
            return
        for name, parameter in self.parameters():
            values = state.get(parameter)
            if not values:
                continue
            for key in sorted(values, key=str):
                if isinstance(values[key], torch.Tensor):
                    yield f"{self._prefix}{name}].{key}", values[key]

    def split(self, entry_name: str) -> tuple[str, str] | None:
        """Parameter name and key of an entry name of this optimizer; None for any other."""
        if not entry_name.startswith(self._prefix):
            return None
        parameter, _, key = entry_name[len(self._prefix) :].rpartition("].")
        return parameter, key

    def plain_state(self) -> dict[str, dict[str, Any]]:
        """State values that are not tensors, by parameter name; "" for what belongs to none."""
        plain: dict[str, dict[str, Any]] = {}
        for key, values in self.optimizer.state.items():
            if isinstance(key, torch.Tensor):
                rest = {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
                if rest:
                    plain[self.parameter_name(key)] = rest
            else:
                plain.setdefault("", {})[str(key)] = values
        return dict(sorted(plain.items()))

    def load_plain_state(self, plain: dict[str, dict[str, Any]]) -> None:
        """Put back what `plain_state` gave; values it does not have are dropped."""
        state: dict[Any, Any] = self.optimizer.state
        for key in [key for key in state if not isinstance(key, torch.Tensor)]:
            del state[key]
        state.update(plain.get("", {}))
        for name, parameter in self.parameters():
            wanted = plain.get(name, {})
            if not wanted and parameter not in state:
                continue
            values = state[parameter]
            for key in [k for k, v in values.items() if not isinstance(v, torch.Tensor)]:
                del values[key]
            values.update({key: _on_device(value, parameter) for key, value in wanted.items()})
            if not values:
                del state[parameter]


def _on_device(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(parameter.device)
    if type(value) in (list, tuple):
        return type(value)(_on_device(item, parameter) for item in value)
    return value
