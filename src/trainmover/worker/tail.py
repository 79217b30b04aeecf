"""From the gate to the next boundary: was a value invented there, and did it touch state?

A collective behind the gate can't be undone with its step. If a loss cuts it short, its value is
dropped; digests from before the first invented value and from the boundary show whether state was
touched (protocol.md B2; version counters miss writes through `.data`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

MASK = (1 << 63) - 1


class Tail:
    """Watches one rank's tails."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.digest: int | None = None
        """Of all state, from before the first invented value; None where none was invented."""

    def before_invented(self) -> None:
        """Take the digest that shows whether a dropped value has touched state (protocol.md B2)."""
        if self._stepper.phase == "tail" and self.digest is None:
            self.digest = self.whole_digest()

    def whole_digest(self) -> int:
        """Of all tracked state of this rank."""
        value = self._stepper.inventory.bulk_digest()
        for digest in self._stepper.own.small_digests():
            value = (value * 1_000_003 + digest) & MASK
        return value

    def end(self) -> None:
        if self._stepper.phase != "tail":
            return
        self._stepper.watch.end()
        if self.digest is None or self._stepper.is_shadow:
            return  # no value was invented behind the gate, whatever has broken since
        step = self._stepper.step_index - 1
        if self.whole_digest() != self.digest:
            self._stepper.broken_state = (
                f"a collective after optimizer.step() of step {step} was cut short and state has "
                "changed since"
            )
        else:
            self._stepper.logbook.finding(
                "dropped",
                f"step {step}: a collective after optimizer.step() was cut short by a loss "
                f"({self._stepper.watch.last_invented}); its value is dropped, state is untouched. "
                'Use step.log(..., reduce="mean") or put it in front of optimizer.step().',
            )
        self._stepper.host.clear_taint()
