"""What the first steps show about collectives in places where a loss can't be undone.

Names each place once, with file and line and the remedy; afterwards nothing is watched and nothing
is paid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.worker.sequence import is_called_from, script_place

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

WATCHED_STEPS = 3


class EarlyFindings:
    """Watches the collectives of the first steps of one entry of `main`."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._seen: set[str] = set()

    def watch(self, kind: str) -> None:
        """One collective is entered."""
        stepper = self._stepper
        if stepper.step_index >= WATCHED_STEPS and not stepper.is_shadow:
            stepper.watch.on_early = None
            return
        if stepper.phase == "tail":
            what = (
                "a loss there drops its value"
                if stepper.host.config.exact_tail == "off"
                else "each rank keeps a copy of its state in front of every update from now on, so "
                "that a loss there can repeat the step (worker.exact_tail)"
            )
            self._tell(
                "tail-collective",
                f"{kind} is called after optimizer.step(): {what}. "
                'Use step.log(..., reduce="mean"), or put it in front of optimizer.step()',
            )
        if stepper.phase != "building" and is_called_from("/worker/batches.py"):
            self._tell(
                "loader-collective",
                f"{kind} is called while a batch is read: on a repeated step ranks that hold the "
                "batch already would not take part. Let each rank read its own shard "
                "(dispatch_batches=False)",
            )

    def _tell(self, kind: str, text: str) -> None:
        place = script_place()
        key = f"{kind} {place}"
        if key not in self._seen:
            self._seen.add(key)
            self._stepper.logbook.finding(kind, f"{place}: {text}")
