"""The one loop that drives a decider: receive -> transition -> act, and wake for deadlines.

Decides nothing. Commands are carried out in order and to their end before the next event is
looked at: a journal record is durable before any later command of its list goes out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from trainmover.edges import clock
from trainmover.units import Instant

S = TypeVar("S")
E = TypeVar("E")
C = TypeVar("C")
S_co = TypeVar("S_co", covariant=True)
C_co = TypeVar("C_co", covariant=True)

LONGEST_SLEEP_S = 1.0
MAX_EVENTS_PER_PASS = 256
"""Then other tasks of the process get their turn."""


class Move(Protocol[S_co, C_co]):
    """What a transition returns."""

    @property
    def state(self) -> S_co:
        """State after the event."""

    @property
    def commands(self) -> Iterable[C_co]:
        """What is to be done, in order."""

    @property
    def reason(self) -> str:
        """One clause for people."""


@dataclass(frozen=True, kw_only=True)
class Decider(Generic[S, E, C]):
    """A decider's two functions and its event for the passage of time."""

    transition: Callable[[S, E, Instant], Move[S, C]]
    next_deadline: Callable[[S], Instant | None]
    tick: E


class DeciderLoop(Generic[S, E, C]):
    """Owns the state; events are posted from the event loop's thread."""

    def __init__(
        self,
        decider: Decider[S, E, C],
        state: S,
        act: Callable[[C], None],
        name: str,
        *,
        on_reason: Callable[[str], None] | None = None,
    ) -> None:
        self._decider = decider
        self._state = state
        self._act = act
        self._log = logging.getLogger(name)
        self._on_reason = on_reason
        self._events: deque[E] = deque()
        self._wake = asyncio.Event()
        self._is_over = False

    @property
    def state(self) -> S:
        """State after the last event."""
        return self._state

    def post(self, event: E) -> None:
        """Queue an event."""
        self._events.append(event)
        self._wake.set()

    def stop(self) -> None:
        """Leave `run` after the commands under way."""
        self._is_over = True
        self._wake.set()

    async def run(self) -> None:
        """Until `stop`. An exception of decider or action is a bug: it ends the process."""
        while not self._is_over:
            await self._sleep()
            if not self._events and not self._is_over:
                self.step(self._decider.tick)
            for _ in range(MAX_EVENTS_PER_PASS):
                if not self._events or self._is_over:
                    break
                self.step(self._events.popleft())
            await asyncio.sleep(0)

    def step(self, event: E) -> None:
        """One move and all it causes."""
        move = self._decider.transition(self._state, event, clock.now())
        self._state = move.state
        if move.reason:
            self._log.info("%s: %s", type(event).__name__, move.reason)
            if self._on_reason is not None:
                self._on_reason(move.reason)
        for command in move.commands:
            self._act(command)

    async def _sleep(self) -> None:
        if self._events:
            return
        self._wake.clear()
        deadline = self._decider.next_deadline(self._state)
        limit_s = LONGEST_SLEEP_S
        if deadline is not None:
            limit_s = min(limit_s, clock.seconds_until(deadline))
        try:
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        except TimeoutError:
            return
