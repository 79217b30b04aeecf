"""What is to be said once the lock is free: completed futures and events.

Callbacks of futures are user code (communication hooks start further collectives in them), and
event handlers take locks of their own; neither may run under the engine's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from trainmover.communicator.engine import Engine


class Outbox:
    """Collected under the lock, drained without it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._completions: deque[tuple[torch.futures.Future[Any], Any]] = deque()
        self._events: deque[Callable[[], None]] = deque()

    def complete(self, future: torch.futures.Future[Any], result: Any) -> None:
        """Complete `future` soon, on whichever thread drains."""
        self._completions.append((future, result))

    def event(self, fn: Callable[[], None]) -> None:
        """Call `fn` soon, on the I/O thread."""
        self._events.append(fn)

    def drain(self) -> None:
        """Say everything; the caller must not hold the lock.

        Events first: a break must be known (taint set) before the works it ends complete.
        """
        if self._events:
            if self._engine.on_thread():
                self._say_events()
            else:
                self._engine.submit(self.drain)
        while self._completions:
            try:
                future, result = self._completions.popleft()
            except IndexError:  # another thread took the last one
                return
            future.set_result(result)
            self._engine.completed()

    def _say_events(self) -> None:
        while self._events:
            self._events.popleft()()
