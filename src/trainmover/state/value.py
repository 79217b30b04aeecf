"""A plain value of the training script that takes part in undo and transfer.

Decides nothing; `Value` is the smallest object with `state_dict`.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Value(Generic[T]):
    """A tracked plain value: `best = trainmover.Value(1e9)`, then `best.value = loss`.

    Only plain data can be kept: None, numbers, strings, bytes, containers of those, small tensors
    and arrays. What can't be captured is refused by `track()` with its name.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        """The value."""
        return self.value

    def set(self, value: T) -> None:
        """Replace the value."""
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """The value under the one key `value`."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the value by one from `state_dict`."""
        self.value = state["value"]

    def __repr__(self) -> str:
        return f"Value({self.value!r})"
