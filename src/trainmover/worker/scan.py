"""Finds objects of the training script that are part of its state but were not tracked.

Decides which live objects count: modules with parameters or buffers, optimizers, schedulers,
gradient scalers and loaders that no tracked object leads to. Only the outermost of nested objects
is named. Objects without state of their own (a loss module, a disabled scaler) never count.
"""

from __future__ import annotations

import ast
import gc
import linecache
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from trainmover.worker.batches import Batches
from trainmover.worker.live_objects import live_objects

_KINDS: Final[tuple[tuple[str, type], ...]] = (
    ("module", nn.Module),
    ("optimizer", Optimizer),
    ("scheduler", LRScheduler),
    ("scaler", GradScaler),
    ("loader", DataLoader),
)
_DEPTH: Final = 4
_LIMIT: Final = 20_000


@dataclass(frozen=True)
class Finding:
    """One live object that nothing tracks."""

    kind: str
    type_name: str
    name: str
    """Variable or attribute that holds it; "" if none was found."""
    detail: str
    file: str
    line: int

    @property
    def message(self) -> str:
        """What was found and the two ways to answer it."""
        where = ", ".join(part for part in (self.detail, self._place) if part)
        label = f"{self.type_name} {self.name!r}" if self.name else self.type_name
        name = self.name.rpartition(".")[2] or self.kind
        remedy = f"track({name}=...)" if self.kind != "loader" else f"job.batches({name})"
        suffix = f" ({where})" if where else ""
        return f"found but not tracked: {label}{suffix}. {remedy} or track(..., ignore=[{name}])"

    @property
    def _place(self) -> str:
        name = Path(self.file).name
        return f"{name}:{self.line}" if self.line else name


def find_untracked(tracked: Iterable[object], ignore: Iterable[object] = ()) -> list[Finding]:
    """Live stateful objects that neither `tracked` nor `ignore` lead to.

    Called on: the training thread; names are looked up in the frames above the caller.

    Args:
        tracked: Tracked objects, and the `Batches` of the job.
        ignore: Objects the script asked to leave out, with everything they contain.
    """
    known = _Known()
    for item in (*tracked, *ignore):
        known.add(item, 0)
    found = _candidates(known)
    if found:
        # A model that went out of use waits for the collector in a reference cycle.
        del found
        gc.collect()
        found = _candidates(known)
    names = _Names([item for _, item in found])
    return sorted(
        (_finding(kind, item, names) for kind, item in found),
        key=lambda finding: (finding.kind, finding.file, finding.line, finding.name),
    )


class _Known:
    """Objects that tracked ones lead to, and the tensors of known modules."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.tensor_ids: set[int] = set()
        self._kept: list[object] = []

    def add(self, item: Any, depth: int) -> None:
        """Take in an object and what it contains."""
        if id(item) in self.ids or depth > _DEPTH or len(self._kept) > _LIMIT:
            return
        if isinstance(item, (str, bytes, int, float, type)) or item is None:
            return
        self.ids.add(id(item))
        self._kept.append(item)  # ids stay valid only while the object lives
        kind = type(item)
        if issubclass(kind, torch.Tensor):
            self.tensor_ids.add(id(item))
        elif issubclass(kind, nn.Module):
            self._add_module(item)
        elif issubclass(kind, Optimizer):
            self._add_named(item, ("optimizers", "optimizer", "optim"), depth)
        elif issubclass(kind, LRScheduler):
            self._add_named(item, ("_schedulers", "schedulers"), depth)
        elif issubclass(kind, DataLoader):
            self._add_named(item, tuple(getattr(item, "__dict__", ())), depth)
        elif issubclass(kind, Batches):
            self.add(item.source, depth)
        else:
            self._add_contents(item, depth)

    def _add_module(self, module: nn.Module) -> None:
        for submodule in module.modules():
            self.ids.add(id(submodule))
        self.tensor_ids.update(id(tensor) for tensor in _tensors(module))
        self._kept.append(module)

    def _add_named(self, item: Any, names: tuple[str, ...], depth: int) -> None:
        for name in names:
            self.add(getattr(item, name, None), depth + 1)

    def _add_contents(self, item: Any, depth: int) -> None:
        """What a user's own object holds counts as captured by its state_dict."""
        if isinstance(item, dict):
            contents: Iterable[Any] = list(item.values())
        elif isinstance(item, (list, tuple, set, frozenset)):
            contents = list(item)
        else:
            attributes = getattr(item, "__dict__", None)
            contents = list(attributes.values()) if isinstance(attributes, dict) else ()
        for value in contents:
            self.add(value, depth + 1)


def _candidates(known: _Known) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for item in live_objects(kind for _, kind in _KINDS):
        name = _kind_of(type(item))
        if name and id(item) not in known.ids and _has_state(name, item, known):
            found.append((name, item))
    inner = _inner_ids(item for _, item in found)
    return [(name, item) for name, item in found if id(item) not in inner]


def _kind_of(kind: type) -> str:
    if str(getattr(kind, "__module__", "")).startswith(
        ("torch.fx", "torch._", "torch.distributed.fsdp")
    ):
        return ""
    return next((name for name, known in _KINDS if issubclass(kind, known)), "")


def _has_state(kind: str, item: Any, known: _Known) -> bool:
    try:
        if kind == "module":
            # A wrapper around tracked modules has no tensor of its own.
            return any(id(tensor) not in known.tensor_ids for tensor in _tensors(item))
        if kind == "scaler":
            return bool(item.is_enabled())
    except (AttributeError, ReferenceError):
        return False  # half built or half destroyed; not in use by the script
    return True


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for submodule in module.modules():
        for tensor in (*submodule._parameters.values(), *submodule._buffers.values()):
            if tensor is not None:
                yield tensor


def _inner_ids(items: Iterable[Any]) -> set[int]:
    """Ids of objects that belong to one of the given objects."""
    inner: set[int] = set()
    for item in items:
        if isinstance(item, nn.Module):
            inner.update(id(child) for child in item.modules() if child is not item)
        else:
            inner.update(id(part) for part in _parts(item))
    return inner


def _parts(item: Any) -> Iterator[Any]:
    names = ["optim", "optimizers", "_schedulers", "base_dataloader"]
    if not isinstance(item, LRScheduler):
        names.append("optimizer")  # a scheduler's optimizer is an object in its own right
    for name in names:
        value = getattr(item, name, None)
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _finding(kind: str, item: Any, names: _Names) -> Finding:
    name, file, line = names.of(item)
    detail = ""
    if kind == "module":
        count = sum(tensor.numel() for tensor in _tensors(item) if not is_lazy(tensor))
        detail = f"{_count(count)} parameters"
    return Finding(kind, type(item).__name__, name, detail, file, line)


def _count(value: int) -> str:
    for limit, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return str(value)


class _Names:
    """Variables and attributes that hold the given objects."""

    def __init__(self, items: list[Any]) -> None:
        self._wanted = {id(item) for item in items}
        self._places: dict[int, tuple[str, str, int]] = {}
        if not items:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._look(frame)
            frame = frame.f_back

    def _look(self, frame: FrameType) -> None:
        if frame.f_globals.get("__name__", "").startswith("trainmover."):
            return
        file = frame.f_code.co_filename
        variables = {**frame.f_globals, **frame.f_locals}
        for name, value in variables.items():
            self._note(value, name, file, name)
            attributes = getattr(value, "__dict__", None) if not isinstance(value, type) else None
            if isinstance(attributes, dict) and not hasattr(value, "__spec__"):
                for attribute, held in list(attributes.items()):
                    self._note(held, f"{name}.{attribute}", file, attribute)

    def _note(self, value: Any, name: str, file: str, assigned: str) -> None:
        if id(value) in self._wanted and id(value) not in self._places:
            self._places[id(value)] = (name, file, _line_of_assignment(file, assigned))

    def of(self, item: Any) -> tuple[str, str, int]:
        """Name, file and line of the first variable that holds the object."""
        return self._places.get(id(item), ("", "", 0))


def _line_of_assignment(file: str, name: str) -> int:
    """First line in which the name (or an attribute of that name) is assigned; 0 if none is."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return 0
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
        or (
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.ctx, ast.Store)
        )
    ]
    return min(lines, default=0)
