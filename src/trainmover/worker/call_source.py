"""Position of a callable that makes batches, such as nanoGPT's `get_batch`.

Decides that such a callable is a function of the global random generators (which the runtime
captures anyway) or of state it hands out itself through `state_dict`. An iterator has hidden
state and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.codec import decode_plain, encode_plain
from trainmover.worker.loader_deal import HOOK


class CallCursor(msgspec.Struct, frozen=True, array_like=True):
    """A place between two calls."""

    calls: int
    state: bytes | None


class CallSource:
    """Calls a callable for each batch."""

    def __init__(self, function: Callable[[], Any]) -> None:
        owner = getattr(function, "__self__", None)
        if inspect.isgenerator(owner) or isinstance(owner, Iterator):
            raise TrackError(
                f"job.batches got a method of a {type(owner).__name__}, whose position can't be "
                "saved. Give job.batches the loader itself, or a function that draws its batch "
                "from the global random generators"
            )
        self._function = function
        self._calls = 0
        holder = owner if hasattr(owner, "state_dict") else function
        has_state = all(
            callable(getattr(holder, name, None)) for name in ("state_dict", "load_state_dict")
        )
        self._holder: Any = holder if has_state else None

    def fetch(self) -> Any:
        """Call for a batch."""
        batch = self._function()
        self._calls += 1
        return batch

    def mark(self) -> CallCursor:
        """The place of now."""
        state = None
        if self._holder is not None:
            state = encode_plain(self._holder.state_dict(), "state_dict() of the batch function")
        return CallCursor(self._calls, state)

    def share_out(self, cursors: Sequence[CallCursor], rank: int, world_size: int) -> None:
        """Go on where another number of ranks have left off.

        Raises:
            StateMismatch: The batch function has a state that differs by rank and can't be merged.
        """
        states = [cursor.state for cursor in cursors]
        merge = getattr(self._holder, HOOK, None)
        first = cursors[0]
        if callable(merge) and None not in states:
            state = merge([decode_plain(s) for s in states if s is not None], rank, world_size)
            first = CallCursor(first.calls, encode_plain(state, f"{HOOK}()"))
        elif len(set(states)) > 1 or (first.state is not None and len(cursors) == 1):
            kind = type(self._holder).__name__
            raise StateMismatch(
                f"the state of a {kind} says nothing about ranks, so a position of {len(cursors)} "
                f"ranks can't be dealt out to {world_size}. Start with {len(cursors)} ranks, or "
                f"give it {HOOK}(states, rank, world_size)"
            )
        self.seek(first)

    def seek(self, cursor: CallCursor) -> None:
        """Go to a place; the global generators are not touched."""
        self._calls = cursor.calls
        if self._holder is not None and cursor.state is not None:
            self._holder.load_state_dict(decode_plain(cursor.state))
