"""When rank 0 asks all ranks for a snapshot, and when for a durable one.

Decides by the policies of the checkpoint room from what is known here: steps, clock, the copy's
cost and the loss as this process sees them; how long a checkpoint takes and how often the job fails
as the controller tells. Asked once per gate, so it is cheap.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median
from typing import Final

from trainmover.checkpoint.cadence import (
    CadenceState,
    Policy,
    cost,
    defaults_for,
    expected_failure_s,
    with_expectation,
)
from trainmover.checkpoint.cadence_text import parse_cadence
from trainmover.protocol.messages import CadenceChosen, CostsMeasured, SnapshotTaken
from trainmover.topology.keeping import Keeping

NONE: Final = 0
MEMORY: Final = 1
DURABLE: Final = 2
STEPS: Final = 31
"""Latest steps whose median counts as a step's time."""
CHANGE: Final = 0.1
"""An interval that has changed by less than this share is no news."""


class _Clock:
    """What one cadence has seen."""

    def __init__(self, policy: Policy, now_s: float) -> None:
        self.policy = policy
        self.last_step = 0
        self.last_s = now_s

    def saved(self, step: int, now_s: float) -> None:
        self.last_step, self.last_s = step, now_s


class SnapshotCadence:
    """Both cadences of one process. Raises ConfigError for a text that is no cadence."""

    def __init__(self, keeping: Keeping, world_size: int, now_s: float) -> None:
        durable = keeping.checkpoint
        self._memory = _Clock(parse_cadence(keeping.snapshot.cadence), now_s)
        self._durable: _Clock | None = None
        self._text = durable.cadence.strip() or f"default for {world_size} ranks"
        if durable.is_on:
            usual = defaults_for(world_size).full
            policy = parse_cadence(durable.cadence) if durable.cadence.strip() else usual
            policy = with_expectation(policy, expected_failure_s(world_size))
            self._durable = _Clock(policy, now_s)
        self._world_size = world_size
        self._begun_s = now_s
        self._blocked_s = 0.0
        self._bytes = 0
        self._costs: CostsMeasured | None = None
        self._learnt_s = now_s
        self._step = -1
        self._step_at_s = now_s
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._told: tuple[float, float] | None = None
        self.loss_is_unstable = False

    def level(self, step: int, now_s: float) -> int:
        """Level due at version `step`."""
        self._note_step(step, now_s)
        if self._durable is not None and self._is_due(self._durable, step, now_s):
            return DURABLE
        return MEMORY if self._is_due(self._memory, step, now_s) else NONE

    def _note_step(self, step: int, now_s: float) -> None:
        if step == self._step + 1:
            self._steps.append(now_s - self._step_at_s)
        if step != self._step:
            self._step, self._step_at_s = step, now_s

    def _is_due(self, clock: _Clock, step: int, now_s: float) -> bool:
        return clock.policy.is_due(self._state(clock, step, now_s))

    def _state(
        self, clock: _Clock, step: int, now_s: float, *, step_s: float = 0.0
    ) -> CadenceState:
        costs = self._costs
        save_s = costs.save_s if costs is not None and clock is self._durable else 0.0
        elapsed_s = now_s - self._begun_s
        if costs is not None:
            elapsed_s = costs.elapsed_s + now_s - self._learnt_s
        return CadenceState(
            step=step,
            now_s=now_s,
            last_save_step=clock.last_step,
            last_save_s=clock.last_s,
            save_cost_s=max(save_s, self._blocked_s),
            blocked_s=self._blocked_s,
            save_bytes=self._bytes,
            failures=costs.failures if costs is not None else 0,
            elapsed_s=elapsed_s,
            loss_is_unstable=self.loss_is_unstable,
            step_s=step_s,
        )

    def learn(self, costs: CostsMeasured, now_s: float) -> None:
        """What the controller has measured."""
        self._costs, self._learnt_s = costs, now_s

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

    def news(self, incarnation: str, now_s: float) -> CadenceChosen | None:
        """What both have come to, if that is another than was told last."""
        step_s = median(self._steps) if self._steps else 0.0
        memory = self._state(self._memory, self._step, now_s, step_s=step_s)
        snapshot_s = _known(self._memory.policy.interval_s(memory))
        checkpoint_s, share, rate, age_s = -1.0, 0.0, 0.0, -1.0
        if self._durable is not None:
            state = self._state(self._durable, self._step, now_s, step_s=step_s)
            costs = cost(self._durable.policy, state)
            checkpoint_s, age_s = _known(costs.interval_s), _known(costs.age_s)
            share, rate = costs.blocked_share, costs.terabytes_per_hour
        if self._told is not None and not _has_changed(self._told, (snapshot_s, checkpoint_s)):
            return None
        self._told = (snapshot_s, checkpoint_s)
        return CadenceChosen(
            incarnation=incarnation,
            snapshot_interval_s=snapshot_s,
            checkpoint_interval_s=checkpoint_s,
            blocked_share=share,
            terabytes_per_hour=rate,
            age_s=age_s,
            reason=self._reason(),
        )

    def _reason(self) -> str:
        parts = [self._text]
        if self._blocked_s:
            parts.append(f"a snapshot blocks {1000 * self._blocked_s:.1f} ms")
        if self._costs is not None and self._costs.save_s:
            parts.append(f"a checkpoint takes {self._costs.save_s:.1f} s")
        if self._costs is not None and self._costs.failures:
            hours = self._costs.elapsed_s / 3600
            parts.append(f"{self._costs.failures} failures in {hours:.1f} h")
        if self.loss_is_unstable:
            parts.append("the loss is unstable")
        return ", ".join(parts)


def _known(value: float) -> float:
    return value if isfinite(value) else -1.0


def _has_changed(before: tuple[float, float], now: tuple[float, float]) -> bool:
    return any(
        abs(new - old) > CHANGE * max(abs(old), 1e-9) for old, new in zip(before, now, strict=True)
    )
