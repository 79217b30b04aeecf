"""Where a step of several parts takes its batches: in the loop body, or inside its parts.

A joiner that comes in between two parts runs the loop body again, but not the parts behind it. So
batches that the body took it must take again, and batches that those parts took it must not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

Mark = tuple[tuple[int, int], ...]
"""Epoch and batches handed out in it, per loader."""


class Reading:
    """Watches who takes batches within one step."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._behind: Mark = ()
        self._at_part: Mark = ()
        self.has_body_read = False

    def _now(self) -> Mark:
        return tuple((batches.epoch, batches.handed_out) for batches in self._stepper.batches)

    def begin(self) -> None:
        """At the top of a step (a joiner: where it comes in)."""
        self._behind = self._now()
        self.has_body_read = False

    def enter_part(self) -> None:
        """A part begins: what has been read since the last one, the body has read."""
        self._at_part = self._now()
        if self._at_part != self._behind:
            self.has_body_read = True

    def leave_part(self) -> None:
        """A part is committed: what it has read is behind the job."""
        self._behind = self._now()
        if self.has_body_read and self._behind != self._at_part:
            self._stepper.logbook.finding(
                "mixed-reads",
                f"step {self._stepper.step_index}: batches are taken both in the loop body and "
                "inside parts; take them all in one of the two, or a loss between parts reads "
                "other samples",
            )
