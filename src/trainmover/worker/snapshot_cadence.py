"""When rank 0 asks all ranks for a snapshot, and when for a durable one.

Decides by the policies of the checkpoint room from what this process has seen itself: steps, clock,
and what its own snapshots have cost. Asked once per gate.
"""

from __future__ import annotations

from typing import Final

from trainmover.checkpoint.cadence import CadenceState, Policy, defaults_for
from trainmover.checkpoint.cadence_text import parse_cadence
from trainmover.protocol.messages import SnapshotTaken
from trainmover.topology.keeping import Keeping

NONE: Final = 0
MEMORY: Final = 1
DURABLE: Final = 2


class _Clock:
    """What one cadence has seen."""

    def __init__(self, policy: Policy, now_s: float) -> None:
        self._policy = policy
        self._last_step = 0
        self._last_s = now_s

    def is_due(self, step: int, now_s: float, cost: tuple[float, int]) -> bool:
        blocked_s, size = cost
        return self._policy.is_due(
            CadenceState(
                step=step,
                now_s=now_s,
                last_save_step=self._last_step,
                last_save_s=self._last_s,
                save_cost_s=blocked_s,
                blocked_s=blocked_s,
                save_bytes=size,
            )
        )

    def saved(self, step: int, now_s: float) -> None:
        self._last_step, self._last_s = step, now_s


class SnapshotCadence:
    """Both cadences of one process. Raises ConfigError for a text that is no cadence."""

    def __init__(self, keeping: Keeping, world_size: int, now_s: float) -> None:
        durable = keeping.checkpoint
        self._memory = _Clock(parse_cadence(keeping.snapshot.cadence), now_s)
        self._durable: _Clock | None = None
        if durable.is_on:
            usual = defaults_for(world_size).full
            policy = parse_cadence(durable.cadence) if durable.cadence.strip() else usual
            self._durable = _Clock(policy, now_s)
        self._world_size = world_size
        self._blocked_s = 0.0
        self._bytes = 0

    def level(self, step: int, now_s: float) -> int:
        """Level due at version `step`."""
        cost = (self._blocked_s, self._bytes)
        if self._durable is not None and self._durable.is_due(step, now_s, cost):
            return DURABLE
        return MEMORY if self._memory.is_due(step, now_s, cost) else NONE

    def begin(self, step: int, now_s: float) -> None:
        """State of version `step` has just been loaded, which is kept somewhere."""
        self._memory.saved(step, now_s)
        if self._durable is not None:
            self._durable.saved(step, now_s)

    def asked(self, step: int, level: int, now_s: float) -> None:
        """All ranks take a snapshot of version `step`, or try to."""
        self._memory.saved(step, now_s)
        if self._durable is not None and level >= DURABLE:
            self._durable.saved(step, now_s)

    def taken(self, taken: SnapshotTaken) -> None:
        """What it cost here."""
        self._blocked_s = taken.blocked_s
        self._bytes = taken.size_bytes * self._world_size
