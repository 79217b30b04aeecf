"""Watches the sequence of collectives a step issues.

Two uses: the digest of a settled sequence (a joiner must issue the same one), and the first
invented value after a loss, which must be known before it can reach state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import xxhash

from trainmover.worker.unwinding import StepUndone

LOOP_CALLS = 2_000
"""Invented values of one attempt after which the script is taken to wait for a true one."""
NO_GRAPH_TASK = -1
SIZED_BY_DATA = frozenset(("all_to_all",))
"""Kinds whose sizes follow the data from step to step (tokens of an expert): with sizes in it the
sequence of such a script would never settle."""


class SequenceWatch:
    """Observer of a communicator; called on the thread that issues a collective."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._last_digests: tuple[str, ...] = ()
        self._is_open = False
        self._groups: dict[str, int] = {}
        self.calls = 0
        """Collectives of the current attempt so far."""
        self.calls_at_gate = 0
        self._invented = 0
        self.is_undoable: Callable[[], bool] = bool
        self.last_call = ""
        self.last_invented = ""
        self.is_running_out: Callable[[], bool] = bool
        self.on_call: Callable[[str], None] | None = None
        self.on_early: Callable[[str], None] | None = None
        """Called with the kind of each collective of the first steps only."""

    def observe(self, call: Any) -> None:
        """One collective is entered."""
        self.calls += 1
        self.last_call = f"{call.kind} {call.group}#{call.sequence}"
        if self._is_open:
            # By order of first use: of groups made alike, each rank is in one with another name.
            group = self._groups.setdefault(call.group, len(self._groups))
            shapes = "" if call.kind in SIZED_BY_DATA else call.shapes
            text = f"{group}|{call.kind}|{shapes}|{call.dtypes}|{call.op};"
            self._hash.update(text.encode())
        if self.on_call is not None:
            self.on_call(self.last_call)
        if self.on_early is not None:
            self.on_early(call.kind)
        if self.is_running_out():
            self.last_invented = f"{call.kind} called at {script_place()}"
            self._leave_loop()

    def _leave_loop(self) -> None:
        """A loop that ends when all ranks say so never ends on invented values: undo from here."""
        self._invented += 1
        is_in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK
        if self._invented > LOOP_CALLS and not is_in_backward and self.is_undoable():
            raise StepUndone

    def let_go(self) -> None:
        """Hold nothing of the entry of `main` that is over."""
        self.on_early = None
        self.is_undoable = bool

    def forget(self) -> None:
        """`main` is entered again: nothing has settled yet."""
        self._last_digests = ()
        self._is_open = False

    def begin(self) -> None:
        """An attempt starts."""
        self._hash = xxhash.xxh3_64()
        self._groups = {}
        self._is_open = True
        self.calls = 0
        self.calls_at_gate = 0
        self._invented = 0

    def end(self) -> None:
        """The attempt was committed (or, in loop-back, ended)."""
        if self._is_open:
            self._last_digests = (*self._last_digests[-1:], self._hash.hexdigest())
        self._is_open = False

    def cancel(self) -> None:
        """The attempt was undone: it says nothing about the next one."""
        self._is_open = False

    @property
    def open_digest(self) -> str:
        """Digest of the current attempt so far."""
        return self._hash.hexdigest()

    @property
    def is_settled(self) -> bool:
        """Whether the last two complete attempts issued the same sequence."""
        return len(self._last_digests) == 2 and self._last_digests[0] == self._last_digests[1]

    @property
    def settled_digest(self) -> str:
        """Digest of the settled sequence; empty while it still changes."""
        return self._last_digests[1] if self.is_settled else ""


def script_place(skip: tuple[str, ...] = ("/trainmover/", "/torch/", "/contextlib.py")) -> str:
    """file:line of the innermost caller outside trainmover and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in skip) and not name.startswith("<"):
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "unknown place"


def is_called_from(part: str) -> bool:
    """Whether a caller's file name contains `part`."""
    frame = sys._getframe(1)
    while frame is not None:
        if part in frame.f_code.co_filename:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
