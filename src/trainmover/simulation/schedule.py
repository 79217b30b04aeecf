"""Simulated time: a heap of (instant, sequence, action). Equal instants run in order of entry."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from trainmover.units import Instant, seconds

Action = Callable[[], None]


class Schedule:
    """What happens when. The only clock of a simulated world."""

    def __init__(self) -> None:
        self.now = Instant(0)
        self.count = 0
        self._heap: list[tuple[int, int, Action]] = []

    def at(self, instant: int, action: Action) -> None:
        """Run `action` at `instant`, not before now."""
        self.count += 1
        heapq.heappush(self._heap, (max(instant, self.now), self.count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Run `action` `delay_s` from now."""
        self.at(self.now + seconds(delay_s), action)

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._heap:
            return False
        instant, _, action = heapq.heappop(self._heap)
        self.now = Instant(instant)
        action()
        return True
