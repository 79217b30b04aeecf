"""Finds what a script carries from one step to the next behind the runtime's back.

`trainmover check` undoes an attempt although nothing has failed. A variable of the script that
differs between the start of that attempt and the start of its repetition was changed by the
attempt and not put back; if the loop body reads it before writing it, the repeated step is
another one. Decides nothing: it names suspects once the numbers have been seen to differ.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import xxhash

from trainmover.state.tensors import tensor_digest

FOREIGN = ("/trainmover/", "/torch/", "<", "/runpy.py", "/site-packages/")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 3
LENGTH = 10_000


@dataclass(frozen=True)
class Variable:
    """One name of the script and what it held."""

    file: str
    digest: str
    tensor_ids: frozenset[int]


@dataclass(frozen=True)
class Suspect:
    """A name that an undone attempt has changed."""

    name: str
    place: str
    is_batch: bool

    @property
    def kind(self) -> str:
        """What has been carried over."""
        return "a batch" if self.is_batch else "a value that is not tracked"


Variables = dict[str, Variable]


def variables() -> Variables:
    """Plain values and tensors that the script's frames above the caller hold."""
    found: Variables = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in FOREIGN):
            _add_all(found, {**frame.f_globals, **frame.f_locals}, file)
        frame = frame.f_back
    return found


def suspects(before: Variables, after: Variables, batch_ids: frozenset[int]) -> list[Suspect]:
    """Names whose values differ and which the loop body reads first."""
    found = []
    for name, seen in after.items():
        kept = before.get(name)
        if kept is not None and kept.digest == seen.digest:
            continue
        line = line_of_carried(seen.file, name)
        if line:
            place = f"{seen.file.rsplit('/', 1)[-1]}:{line}"
            found.append(Suspect(name, place, bool(seen.tensor_ids & batch_ids)))
    return found


def tensor_ids(value: Any) -> frozenset[int]:
    """Identities of all tensors in a value."""
    return frozenset(id(item) for item in _leaves(value, DEPTH) if isinstance(item, torch.Tensor))


def _add_all(found: Variables, names: dict[str, Any], file: str) -> None:
    for name, value in names.items():
        if not name.startswith("__"):
            _add(found, name, value, file)


def _add(found: Variables, name: str, value: Any, file: str) -> None:
    if name in found:
        return
    digest = _digest(value)
    if digest:
        found[name] = Variable(file, digest, tensor_ids(value))
    elif str(type(value).__module__) == "__main__":
        for attribute, held in list(getattr(value, "__dict__", {}).items()):
            if isinstance(held, (*PLAIN, list, tuple)):
                _add(found, f"{name}.{attribute}", held, file)


def _digest(value: Any) -> str:
    """Of plain values, tensors and containers of them; empty for anything else."""
    hasher = xxhash.xxh3_64()
    for leaf in _leaves(value, DEPTH):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_meta or leaf.layout != torch.strided or type(leaf) is not torch.Tensor:
                return ""
            hasher.update(str((leaf.shape, tensor_digest(leaf.detach()))).encode())
        elif isinstance(leaf, PLAIN):
            hasher.update(repr(leaf).encode())
        else:
            return ""
    return hasher.hexdigest()


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if type(value) in (list, tuple, dict, set) and depth and len(value) <= LENGTH:
        yield f"{type(value).__name__} of {len(value)}"
        for item in value.items() if isinstance(value, dict) else value:
            yield from _leaves(item, depth - 1)
    else:
        yield value


def line_of_carried(file: str, name: str) -> int:
    """Line in the loop's body that writes `name` after it was read there; 0 if it is written first
    or is no name of the loop."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return 0
    for loop in ast.walk(tree):
        if isinstance(loop, ast.For | ast.While) and any(
            isinstance(node, ast.With) for node in loop.body
        ):
            uses = [use for node in loop.body for use in _uses(node, name)]
            stores = [line for is_read, line in uses if not is_read]
            if uses and uses[0][0] and stores:
                return stores[0]
    return 0


def _uses(node: ast.AST, name: str) -> Iterator[tuple[bool, int]]:
    """Reads and writes of `name` in the order of execution: (is read, line)."""
    if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) == name:
        yield isinstance(node.ctx, ast.Load), node.lineno
        return
    if isinstance(node, ast.AugAssign):
        if ast.unparse(node.target) == name:
            yield True, node.lineno
        yield from _uses(node.value, name)
        yield from _uses(node.target, name)
        return
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for part in [node.value, *targets] if node.value is not None else targets:
            yield from _uses(part, name)
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # A method may write its object: `losses.append(x)` reads and writes `losses`.
        is_own_method = ast.unparse(node.func.value) == name
        yield from [(True, node.lineno), (False, node.lineno)] if is_own_method else []
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, name)
