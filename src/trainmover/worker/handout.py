"""How one batch is handed to the script, and how a change to it is noticed.

Decides what of a batch is copied on hand-out: containers always (a script that pops a key must
not take it from the repeat), tensors only on request. A tensor the script wrote into in place
would make the repeated step read other data; it is found by its version counter, an array by its
digest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from trainmover.errors import ScriptError
from trainmover.state.tensors import tensor_digest, tensor_version


class Handout:
    """A batch as it came from its source."""

    def __init__(self, batch: Any, *, copies_tensors: bool) -> None:
        self._batch = batch
        self._copies_tensors = copies_tensors
        self._witnesses: list[tuple[str, Any, int]] | None = None

    @property
    def batch(self) -> Any:
        """The batch itself, as it is now."""
        return self._batch

    def give(self, *, is_remembered: bool) -> Any:
        """The batch for the script.

        Args:
            is_remembered: Whether the same batch may have to be given again.
        Raises:
            ScriptError: It was given before and changed in place since.
        """
        if self._witnesses is not None:
            self._check()
        elif is_remembered and not self._copies_tensors:
            self._witnesses = [(path, leaf, _mark(leaf)) for path, leaf in _leaves(self._batch, "")]
        return _handed(self._batch, self._copies_tensors)

    def _check(self) -> None:
        for path, leaf, mark in self._witnesses or ():
            if _mark(leaf) != mark:
                raise ScriptError(
                    f"batch{path} was changed in place by the interrupted step, so the step can't "
                    "be repeated with the same data. Write x = x * 2 instead of x.mul_(2), or use "
                    "job.batches(loader, copy=True)"
                )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")


def _mark(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        version = tensor_version(leaf)
        return version if version >= 0 else tensor_digest(leaf)
    return tensor_digest(torch.from_numpy(np.ascontiguousarray(leaf).view(np.uint8).reshape(-1)))


def _handed(value: Any, copies_tensors: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if copies_tensors else value
    if isinstance(value, np.ndarray):
        return value.copy() if copies_tensors else value
    kind = type(value)
    if kind is dict:
        return {key: _handed(item, copies_tensors) for key, item in value.items()}
    if kind is list:
        return [_handed(item, copies_tensors) for item in value]
    if isinstance(value, tuple):
        items = [_handed(item, copies_tensors) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, MutableMapping):
        fresh = copy.copy(value)
        for key in list(fresh):
            fresh[key] = _handed(value[key], copies_tensors)
        return fresh
    if isinstance(value, list):
        return copy.copy(value)
    return value
