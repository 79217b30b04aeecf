"""Backing up every step: records what each update is made of, in front of its gate.

Decides which steps may be told as an increment, and refuses by name what playing them again would
not reproduce: optimizers that need more than gradients, gradients that are not final at the gate,
state changed elsewhere than in the optimizer's step. The first updates of a process are watched for
that by digests; later ones carry a digest of the parameters, so that a joiner notices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainmover.errors import TrackError
from trainmover.protocol.messages import Version
from trainmover.state.increment import (
    GradientLayout,
    IncrementHead,
    head_of_update,
    why_not_replayable,
)
from trainmover.worker.increment_store import Increment

if TYPE_CHECKING:
    import torch

    from trainmover.worker.increment_side import IncrementSide
    from trainmover.worker.stepper import Stepper

WATCHED_UPDATES: Final = 3
"""Updates of a process around which all bulk state is compared."""
RETRY_STEPS: Final = 2
"""Between a snapshot that was left out and the next that is asked for."""


class Increments:
    """One rank's, in one entry of `main`; on the main thread."""

    def __init__(self, stepper: Stepper) -> None:
        self.replicas: tuple[int, ...] = ()
        """Ranks that hold the same bulk state."""
        self.is_playing = False
        """The optimizer steps because a joiner plays increments: no step of the script."""
        self.is_paused = False
        """Left out for a while, by whoever measures what they cost."""
        self.refusal = ""
        """Why this rank tells no increments; empty: it does."""
        self._stepper = stepper
        self._optimizer: torch.optim.Optimizer | None = None
        self._layout: GradientLayout | None = None
        self._steps_since_snapshot = 0
        self._has_recorded = False
        self._watched = 0
        self._at_boundary: dict[str, int] | None = None
        self._behind_update: dict[str, int] | None = None

    @property
    def _side(self) -> IncrementSide | None:
        side = self._stepper.host.increments
        if side is None or not side.config.ships_increments or self.refusal:
            return None
        stepper = self._stepper
        if stepper.is_shadow or not side.must_ship(stepper.rank, self.replicas):
            return None
        return side

    # ------------------------------------------------------------------ snapshots beneath

    def wants_snapshot(self) -> bool:
        """In front of a gate: increments need a snapshot to be played on that is not too old."""
        side = self._side
        if side is None or not self._has_recorded:
            return False
        is_first = self._stepper.version.step == 0
        return is_first or self._steps_since_snapshot >= side.config.increments_kept // 2

    def snapshot_asked(self) -> None:
        """The gate has passed that asks all ranks for one."""
        self._steps_since_snapshot = 0

    def snapshot_failed(self) -> None:
        """It was left out: ask again soon."""
        side = self._stepper.host.increments
        if side is not None:
            due = side.config.increments_kept // 2 - RETRY_STEPS
            self._steps_since_snapshot = max(self._steps_since_snapshot, due)

    # ------------------------------------------------------------------ around an update

    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step begins: in front of the gate, unless that was entered already."""
        if self._stepper.phase == "running":
            self._optimizer = optimizer
        elif self._has_recorded and self._stepper.phase == "tail":
            self._refuse("an optimizer stepped again behind the gate of its step")

    def record(self, version: Version, *, has_update: bool) -> None:
        """At the gate, in front of personal state: send what leads to `version`."""
        optimizer, self._optimizer = self._optimizer, None
        self._has_recorded = False
        side = self._side
        if side is None or self.is_paused:
            return
        try:
            increment = self._increment(side, version, optimizer, has_update=has_update)
        except TrackError as error:
            self._refuse(str(error))
            return
        side.ship(increment)
        self._has_recorded = True
        self._steps_since_snapshot += 1

    def _increment(
        self,
        side: IncrementSide,
        version: Version,
        optimizer: torch.optim.Optimizer | None,
        *,
        has_update: bool,
    ) -> Increment:
        stepper = self._stepper
        head = IncrementHead(
            owner_rank=stepper.rank,
            base=stepper.version,
            version=version,
            base_digest=stepper.inventory.parameter_digest(),
        )
        if not has_update:
            return Increment(head, None)
        layout = self._layout_of(optimizer)
        assert optimizer is not None
        self._compare_at_gate()
        block = side.store.reserve(layout.size_bytes)
        absent = layout.capture(block)
        head = head_of_update(head, optimizer, block, absent)
        return Increment(head, block)

    def _layout_of(self, optimizer: torch.optim.Optimizer | None) -> GradientLayout:
        optimizers = self._stepper.inventory.optimizers
        if optimizer is None:
            raise TrackError("the gate was entered by hand, and the update is made behind it")
        if len(optimizers) != 1:
            names = ", ".join(type(each).__name__ for each in optimizers)
            raise TrackError(f"there are several optimizers ({names})")
        reason = why_not_replayable(optimizer)
        if reason:
            raise TrackError(reason)
        if self._layout is None or not self._layout.fits(optimizer):
            self._layout = GradientLayout(optimizer)
        return self._layout

    # ------------------------------------------------------------------ what else changes state

    def _compare_at_gate(self) -> None:
        """Raises TrackError."""
        if self._at_boundary is None:
            return
        changed = _first_change(self._at_boundary, self._stepper.inventory.bulk_digests())
        self._at_boundary = None
        if changed:
            raise TrackError(f"{changed} changes in front of optimizer.step()")

    def stepped(self) -> None:
        """The optimizer's step has ended."""
        stepper = self._stepper
        if not self._has_recorded or stepper.phase != "tail":
            return
        if stepper.watch.calls > stepper.watch.calls_at_gate:
            self._refuse("the optimizer communicates inside of its step")
        elif self._watched < WATCHED_UPDATES:
            self._behind_update = stepper.inventory.bulk_digests()

    def at_boundary(self) -> None:
        """The next version stands; what an undo puts back is the same as before."""
        before, self._behind_update = self._behind_update, None
        if self._watched >= WATCHED_UPDATES or self._side is None:
            self._at_boundary = None
            return
        self._at_boundary = self._stepper.inventory.bulk_digests()
        if before is not None:
            self._watched += 1
            changed = _first_change(before, self._at_boundary)
            if changed:
                self._refuse(f"{changed} changes behind optimizer.step()")

    def gone_back(self) -> None:
        """The last update was taken back: it is told again when it is made again."""
        side, stepper = self._stepper.host.increments, self._stepper
        self._has_recorded = False
        self._at_boundary = self._behind_update = None
        if side is not None:
            side.store.drop_above(stepper.version.step, stepper.rank)

    def _refuse(self, reason: str) -> None:
        side = self._stepper.host.increments
        self.refusal = reason
        if side is not None:
            side.void(self._stepper.rank)
        self._stepper.logbook.finding(
            "increments",
            f"steps are not backed up one by one: {reason}. A loss without a live replica goes "
            "back to the newest snapshot (snapshot.cadence)",
        )


def _first_change(before: dict[str, int], after: dict[str, int]) -> str:
    """Name of an entry that was there and is another now; new ones are an optimizer's first."""
    return next((name for name, value in before.items() if after.get(name) != value), "")
