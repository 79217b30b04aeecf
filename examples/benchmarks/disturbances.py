"""What benchmarks do to a job from inside: wait for a moment, be slow on one machine.

Read from the environment, so that the undisturbed run has the same command line and does neither.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

from trainmover.drills import pauses

HOLD_VARIABLE = "BENCH_HOLD"
"""`STEP:FILE`, with commas between: ranks wait in front of each step until its file is there."""
SLOW_VARIABLE = "BENCH_SLOW"
"""`MACHINE:STEP:SHARE`: from that step on each forward there sleeps that share of a step."""
HOLD_LIMIT_S = 1500.0
LINGER_STEPS, LINGER_S = 10, 4.0
"""A job that is held pauses in front of its last steps while somebody still acts on it: a machine
that stands still for a moment must not let it end before (`trainmover.drills.pauses`)."""
POLL_S = 0.02


class Hold:
    """Keeps all ranks between two steps until a benchmark lets them go on."""

    def __init__(self) -> None:
        text = os.environ.get(HOLD_VARIABLE, "")
        pairs = (each.partition(":") for each in text.split(",") if each)
        self.paths = {int(step): Path(path) for step, _, path in pairs}

    def enter(self, step: int, steps: int) -> None:
        """In front of `step` of `steps`. Raises TimeoutError when nobody lets it go on."""
        if self.paths and step >= steps - LINGER_STEPS:
            _linger(step)
        path = self.paths.get(step)
        deadline = time.monotonic() + HOLD_LIMIT_S
        while path is not None and not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} was not made in {HOLD_LIMIT_S:.0f} s")
            time.sleep(POLL_S)


def _linger(step: int) -> None:
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline and not pauses.is_passable(step):
        time.sleep(POLL_S)


class Slowdown:
    """Sleeps in the forward on one machine, by a share of its own median step so far."""

    def __init__(self) -> None:
        text = os.environ.get(SLOW_VARIABLE, ":-1:0")
        machine, step, share = text.rsplit(":", 2)
        self.is_here = machine == os.environ.get("TRAINMOVER_MACHINE")
        self.first = int(step)
        self.share = float(share)
        self.steps_s: list[float] = []
        self.sleep_s = 0.0
        self.last_s: float | None = None

    def forward(self, step: int) -> None:
        """In the forward of `step`; never called by a shadow."""
        if not self.is_here:
            return
        now_s = time.monotonic()
        if step == self.first and len(self.steps_s) > 2:
            self.sleep_s = self.share * statistics.median(self.steps_s[-40:])
        if self.last_s is not None and step < self.first:
            self.steps_s.append(now_s - self.last_s)
        self.last_s = now_s
        if step >= self.first:
            time.sleep(self.sleep_s)
