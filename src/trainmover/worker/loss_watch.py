"""Whether the logged loss can be trusted: not finite, stuck, or unstable. Pure.

Decides by this process's own logged values, step by step; what is done about it is decided by the
cadence (denser while it is unstable), by snapshots (suspect) and by the controller (the last good
version is kept aside). A value that is logged again for the same step replaces the earlier one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final, Literal

Doubt = Literal["", "non_finite", "stuck"]

WINDOW: Final = 64
"""Latest finite losses that the next one is set against."""
LEAST: Final = 16
"""So many are needed before one can be called a spike."""
SPIKE: Final = 8.0
"""In median deviations above the median: noise of a mini-batch stays below that."""
LEAST_SPREAD: Final = 1e-3
"""Least median deviation, as a part of the median."""
UNSTABLE_STEPS: Final = 50
"""How long a spike or a value that was not finite counts as unstable."""


class LossWatch:
    """What one process has logged as its loss."""

    def __init__(self, stuck_after: int) -> None:
        self._stuck_after = stuck_after
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._step = -1
        self._values: dict[str, str] = {}
        self._same = ""
        self._same_count = 0
        self._spiked_at = -UNSTABLE_STEPS - 1

    def log(self, step: int, values: Mapping[str, str]) -> None:
        """Values of one step as texts, floats as hex; several calls per step add up."""
        if step != self._step:
            self._settle()
            self._step, self._values = step, {}
        self._values.update(values)
        if self.is_non_finite:
            self._spiked_at = step

    def _settle(self) -> None:
        """The step before is over: its loss joins the recent ones."""
        text = loss_of(self._values)
        if not text:
            return
        self._same_count = self._same_count + 1 if text == self._same else 1
        self._same = text
        value = _as_float(text)
        if value is None or _is_bad(text):
            return
        if self._is_spike(value):
            self._spiked_at = self._step
        self._recent.append(value)

    def _is_spike(self, value: float) -> bool:
        if len(self._recent) < LEAST:
            return False
        middle = median(self._recent)
        if value <= middle + SPIKE * LEAST_SPREAD * abs(middle):
            return False
        spread = median(abs(each - middle) for each in self._recent)
        return value > middle + SPIKE * max(spread, LEAST_SPREAD * abs(middle))

    @property
    def is_non_finite(self) -> bool:
        """Whether the newest step that logged anything logged a value that is not finite."""
        return any(_is_bad(text) for text in self._values.values())

    @property
    def is_stuck(self) -> bool:
        """Whether the loss has been exactly the same for too many steps."""
        return bool(self._stuck_after) and self._same_count >= self._stuck_after

    @property
    def is_unstable(self) -> bool:
        """Whether it has jumped lately, or was not finite."""
        return self._step - self._spiked_at <= UNSTABLE_STEPS

    @property
    def doubt(self) -> Doubt:
        """Why state of now is suspect; empty: it is not."""
        if self.is_non_finite:
            return "non_finite"
        return "stuck" if self.is_stuck else ""

    @property
    def text(self) -> str:
        """The doubt in words."""
        if self.is_non_finite:
            bad = ", ".join(f"{n} = {t}" for n, t in sorted(self._values.items()) if _is_bad(t))
            return f"step {self._step} logged {bad}"
        if self.is_stuck:
            return f"the loss has been {self._same} for {self._same_count} logged steps"
        return ""


def loss_of(values: Mapping[str, str]) -> str:
    """The value that is the loss by its name; empty where none is."""
    if "loss" in values:
        return values["loss"]
    names = sorted(name for name in values if "loss" in name.lower())
    return values[names[0]] if names else ""


def _is_bad(text: str) -> bool:
    return text.lstrip("-") in ("nan", "inf")


def _as_float(text: str) -> float | None:
    for read in (float.fromhex, float):
        try:
            return read(text)
        except (ValueError, OverflowError):
            continue
    return None
