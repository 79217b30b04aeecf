"""Small leaves: plain data of optimizers, schedulers, scalers and the user's own objects.

Decides how each kind of object is read as plain data and loaded again. Large tensors that a
user's object hands out live from `state_dict` are not copied here: they become bulk slots, and
the leaf keeps a mark in their place.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.codec import decode_plain, encode_plain
from trainmover.state.slots import OptimizerSlots, SeenTensors, Slot, bare_module, check_tensor
from trainmover.state.tensors import local_tensor, storage_key

BULK_FROM_BYTES: Final = 1 << 16
"""Tensors of a user's object from this size on are bulk if `state_dict` hands them out live."""

_MARK: Final = "\0trainmover.bulk"
_UNCHANGEABLE: Final = frozenset((type(None), bool, int, float, str, bytes))


@dataclass(frozen=True)
class Leaf:
    """One small leaf: `read` gives plain data, `load` puts such data back."""

    name: str
    source: object
    read: Callable[[], Any]
    load: Callable[[Any], None]

    def to_bytes(self) -> bytes:
        """Encoded plain data; a TrackError names what is not plain."""
        return encode_plain(self.read(), self.name)

    def from_bytes(self, data: bytes) -> None:
        """Load encoded plain data into the object."""
        self.load(decode_plain(data))


@dataclass(frozen=True)
class RememberedLeaf(Leaf):
    """A leaf whose bytes are not made anew while `values` gives the very same objects, none of
    which can change: three dozen numbers that most steps leave alone."""

    values: Callable[[], tuple[Any, ...]]
    _last: list[tuple[tuple[Any, ...], bytes]] = field(default_factory=list, compare=False)

    def to_bytes(self) -> bytes:
        values = self.values()
        if self._last and _are_identical(values, self._last[0][0]):
            return self._last[0][1]
        data = super().to_bytes()
        self._last[:] = [(values, data)] if all(map(_is_unchangeable, values)) else []
        return data


def _are_identical(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _is_unchangeable(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_unchangeable, value))
    return type(value) in _UNCHANGEABLE


def buffer_bytes(slot: Slot) -> int:
    """Bytes of a buffer as it is now."""
    tensor = slot.read()
    if tensor is None:
        return 0
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def buffer_leaf(name: str, slots: list[Slot]) -> Leaf:
    """All buffers of all tracked modules as one leaf, loaded in place."""

    def read() -> dict[str, torch.Tensor | None]:
        values = {}
        for slot in slots:
            tensor = slot.read()
            values[slot.name] = None if tensor is None else local_tensor(tensor).detach()
        return values

    def load(value: dict[str, torch.Tensor | None]) -> None:
        if list(value) != [slot.name for slot in slots]:
            raise StateMismatch(f"expected buffers {', '.join(value)}")
        for slot in slots:
            wanted, tensor = value[slot.name], slot.read()
            current = None if tensor is None else local_tensor(tensor)
            if wanted is not None and current is not None and _are_alike(current, wanted):
                with torch.no_grad():
                    current.detach().copy_(wanted)
            elif wanted is not None or current is not None:
                assert slot.replace is not None
                slot.replace(wanted)

    if not slots:
        return RememberedLeaf(name, slots, read, load, tuple)
    return Leaf(name, slots, read, load)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def optimizer_leaf(slots: OptimizerSlots) -> Leaf:
    """Values of the parameter groups (learning rate, …) and state that is not tensors."""
    optimizer = slots.optimizer

    def read() -> dict[str, Any]:
        groups = read_groups(optimizer.param_groups)
        return {"groups": groups, "state": slots.plain_state() if optimizer.state else {}}

    def load(value: dict[str, Any]) -> None:
        load_groups(slots.name, optimizer.param_groups, value["groups"])
        slots.load_plain_state(value["state"])

    def values() -> tuple[Any, ...]:
        found: list[Any] = []
        for group in optimizer.param_groups:
            found += (len(group), *group)
            found += [value for key, value in group.items() if key != "params"]
        if optimizer.state and (plain := slots.plain_state()):
            found.append(plain)
        return tuple(found)

    return RememberedLeaf(f"{slots.name}.param_groups", optimizer, read, load, values)


@dataclass(frozen=True, eq=False)
class OuterGroups:
    """Parameter groups of an optimizer that wraps the one that steps and has groups of its own.

    ZeRO's are what a scheduler changes; they overwrite those of the wrapped optimizer at each step.
    """

    optimizer: Any


def outer_groups_leaf(name: str, outer: OuterGroups) -> Leaf:
    """Values of a wrapper's own parameter groups."""
    optimizer = outer.optimizer

    def read() -> list[dict[str, Any]]:
        return read_groups(optimizer.param_groups)

    def load(value: list[dict[str, Any]]) -> None:
        load_groups(name, optimizer.param_groups, value)

    return Leaf(name, optimizer, read, load)


def read_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Values of parameter groups, without the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def load_groups(name: str, groups: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Put values into parameter groups of `name`. Raises StateMismatch for another number."""
    if len(wanted) != len(groups):
        raise StateMismatch(
            f"{name} has {len(groups)} parameter groups here, {len(wanted)} where its state comes "
            "from"
        )
    for group, values in zip(groups, wanted, strict=True):
        _load_group(group, values)


def _load_group(group: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in [key for key in group if key != "params" and key not in wanted]:
        del group[key]
    for key, value in wanted.items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
            # A compiled optimizer and the scheduler hold this very tensor.
            current.copy_(value)
        else:
            group[key] = value


def scaler_leaf(name: str, scaler: GradScaler) -> Leaf:
    """Scale and growth counter of a gradient scaler; nothing for a disabled one."""

    def load(value: dict[str, Any]) -> None:
        if value:
            scaler.load_state_dict(value)

    return Leaf(name, scaler, scaler.state_dict, load)


def scheduler_leaf(name: str, scheduler: LRScheduler) -> Leaf:
    """State of a learning rate scheduler."""
    return Leaf(name, scheduler, scheduler.state_dict, scheduler.load_state_dict)


def generator_leaf(name: str, generator: torch.Generator) -> Leaf:
    """State of a generator the script made itself."""

    def load(value: torch.Tensor) -> None:
        generator.set_state(value)

    return Leaf(name, generator, generator.get_state, load)


def extra_state_leaves(owner: str, module: nn.Module) -> Iterator[Leaf]:
    """`get_extra_state` of submodules that define it."""
    for prefix, submodule in bare_module(module).named_modules():
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            name = ".".join(part for part in (owner, prefix, "extra_state") if part)
            yield Leaf(name, submodule, submodule.get_extra_state, submodule.set_extra_state)


class ObjectState:
    """A user's object with `state_dict` and `load_state_dict`.

    Live large tensors are found once, when the object is tracked, by their place in the tree that
    `state_dict` returns. Tensors that are tracked already under another name (a trainer that
    contains the model) are left out of the leaf: they have their own entry.
    """

    def __init__(self, name: str, source: Any, seen: SeenTensors) -> None:
        self.name = name
        self._source = source
        self._seen = seen
        self._live: dict[tuple[Any, ...], str] = {}
        first = dict(_tensors_in(source.state_dict(), ()))
        second = dict(_tensors_in(source.state_dict(), ()))
        for path, tensor in first.items():
            self._add(path, tensor, second.get(path))

    def _add(self, path: tuple[Any, ...], tensor: torch.Tensor, again: torch.Tensor | None) -> None:
        name = ".".join([self.name, *(str(part) for part in path)])
        if self._seen.name_of(tensor) is not None:
            return
        check_tensor(name, tensor)
        is_live = again is not None and (
            storage_key(local_tensor(again)) == storage_key(local_tensor(tensor))
        )
        if not is_live or tensor.numel() * tensor.element_size() < BULK_FROM_BYTES:
            return
        self._seen.add(tensor, name)
        self._live[path] = name

    def slots(self) -> Iterator[Slot]:
        """Bulk slots of the object's large tensors."""
        for path, name in self._live.items():
            yield Slot(name, "object", self._reader(path, name))

    def _reader(self, path: tuple[Any, ...], name: str) -> Callable[[], torch.Tensor | None]:
        def read() -> torch.Tensor | None:
            found: Any = self._source.state_dict()
            try:
                for part in path:
                    found = found[part]
            except (KeyError, IndexError, TypeError):
                raise StateMismatch(
                    f"{name} was in state_dict() when it was tracked and is not any more"
                ) from None
            return found if isinstance(found, torch.Tensor) else None

        return read

    def leaf(self) -> Leaf:
        """The rest of the object's state as a small leaf."""
        return Leaf(self.name, self._source, self._read, self._load)

    def _is_bulk(self, path: tuple[Any, ...], tensor: torch.Tensor) -> bool:
        return path in self._live or self._seen.name_of(tensor) is not None

    def _read(self) -> Any:
        def mark(path: tuple[Any, ...], tensor: torch.Tensor) -> Any:
            return _MARK if self._is_bulk(path, tensor) else tensor

        return _map_tensors(self._source.state_dict(), (), mark)

    def _load(self, value: Any) -> None:
        if _contains_mark(value):
            value = _fill_marks(value, self._source.state_dict(), self.name)
        self._source.load_state_dict(value)


def object_state(name: str, source: Any, seen: SeenTensors) -> ObjectState:
    """State of a user's object.

    Raises:
        TrackError: The object has no `state_dict` and `load_state_dict`.
    """
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(source, method, None)):
            kind = type(source).__name__
            raise TrackError(
                f"track({name}=...) got a {kind}, which has no {method}(). Track modules, "
                f"optimizers, schedulers, objects with state_dict() and load_state_dict(), or wrap "
                f"a plain value: track({name}=trainmover.Value(...))"
            )
    return ObjectState(name, source, seen)


def _tensors_in(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from _tensors_in(item, (*path, key))
    elif type(tree) in (list, tuple):
        for index, item in enumerate(tree):
            yield from _tensors_in(item, (*path, index))


def _map_tensors(
    tree: Any, path: tuple[Any, ...], change: Callable[[tuple[Any, ...], torch.Tensor], Any]
) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(path, tree)
    if type(tree) in (dict, OrderedDict):
        pairs = ((key, _map_tensors(item, (*path, key), change)) for key, item in tree.items())
        return type(tree)(pairs)
    if type(tree) in (list, tuple):
        return type(tree)(
            _map_tensors(item, (*path, index), change) for index, item in enumerate(tree)
        )
    return tree


def _contains_mark(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_contains_mark(item) for item in tree.values())
    if type(tree) in (list, tuple):
        return any(_contains_mark(item) for item in tree)
    return isinstance(tree, str) and tree == _MARK


def _fill_marks(tree: Any, live: Any, name: str) -> Any:
    """Put the live tensors back where `_read` left marks."""
    if isinstance(tree, str) and tree == _MARK:
        if not isinstance(live, torch.Tensor):
            raise StateMismatch(f"{name} is a tensor where its state comes from and not here")
        return live
    if type(tree) in (dict, OrderedDict):
        inner = live if isinstance(live, dict) else {}
        pairs = (
            (key, _fill_marks(item, inner.get(key), f"{name}[{key!r}]"))
            for key, item in tree.items()
        )
        return type(tree)(pairs)
    if type(tree) in (list, tuple):
        given = live if type(live) in (list, tuple) else ()
        return type(tree)(
            _fill_marks(item, given[i] if i < len(given) else None, f"{name}[{i}]")
            for i, item in enumerate(tree)
        )
    return tree
