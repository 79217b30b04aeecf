"""What the I/O thread asks of the main thread, and the box in which it waits.

The main thread runs the user's script. It takes orders at three places only: before `main` is
entered, at a boundary, and inside the gate. Orders are kept in the order they were given.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from trainmover.protocol.messages import DiskPart, Plan, Rehearsal, Version


@dataclass(frozen=True, slots=True)
class Restore:
    """State to begin with: a durable checkpoint."""

    name: str
    target: Version
    disks: tuple[DiskPart, ...] = ()
    """What of it other machines' disks have."""


@dataclass(frozen=True, slots=True)
class RunMain:
    """Enter `main`, unwinding one that runs."""

    rank: int
    world_size: int
    is_loopback: bool
    attempts: int
    """Loop-back iterations before parking; -1: until the collective sequence has settled."""
    version: int = 0
    """Where the members stand whom this process joins with exactly `attempts`."""
    is_adoption: bool = False
    """Entered again because this standby was built as another rank."""
    number: int = 0
    """Of the order; what an older entry still says is void."""
    rehearsals: tuple[Rehearsal, ...] = ()
    """Standby: classes to walk through, one entry each, this one's first; empty: loop-back."""
    restore: Restore | None = None
    """Member: load this before the first boundary is reported."""


@dataclass(frozen=True, slots=True)
class Go:
    """Run step `step` from its boundary."""

    step: int


@dataclass(frozen=True, slots=True)
class Apply:
    """The gate has passed with this merged vector."""

    step: int
    kind: int
    vector: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Undo:
    """The gate did not pass."""

    step: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Joiner: become the rank that `plan` gives this process."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Receive:
    """Joiner: fetch and verify the state `plan` names."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Settle:
    """Stayer or leaver: make up missing attempts, take digests, open the state to joiners."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Leave:
    """Leaver: end `main` through `Left`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """All ranks are done: `main` may return."""


@dataclass(frozen=True, slots=True)
class Halt:
    """End the process."""

    code: int
    reason: str


Order = RunMain | Go | Apply | Undo | Adopt | Receive | Settle | Leave | Finish | Halt


def _nothing() -> None:
    """Nobody has to be told."""


class OrderBox:
    """Orders for the main thread, first in, first out."""

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._is_alive = is_alive
        self.on_given: Callable[[], None] = _nothing
        """Called behind each order, on the I/O thread: somebody waits for the main thread."""

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits for the main thread."""
        return self._queue.empty()

    def give(self, order: Order) -> None:
        """From the I/O thread; never blocks. Entering `main` anew voids what was ordered before."""
        if isinstance(order, RunMain):
            self._void()
        self._queue.put(order)
        self.on_given()

    def _void(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            return

    def take(self, on_wait: Callable[[], None] | None = None) -> Order:
        """Wait for the next order; `on_wait` is called first where there is none yet.

        Blocks: while the I/O thread lives. Its decider bounds every wait and gives `Halt` when
        one has passed its deadline, so the wait here needs none of its own beyond that thread's
        life.
        """
        if on_wait is not None:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                on_wait()
        while True:
            try:
                return self._queue.get(timeout=1.0)
            except queue.Empty:
                if not self._is_alive():
                    return Halt(code=8, reason="the worker's I/O thread has ended")
