"""What a rank says of itself at a boundary. Decides nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainmover.worker.events import BoundaryReached

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


def boundary_reached(stepper: Stepper) -> BoundaryReached:
    """For the lifecycle: the main thread stands at the top of its version."""
    host, inventory = stepper.host, stepper.inventory
    readers = host.rank_readers()
    walk = host.walk if stepper.is_shadow else None
    return BoundaryReached(
        step=stepper.version.step,
        identity=inventory.identity,
        names_digest=inventory.names_digest,
        attempts=stepper.attempts,
        sequence_digest=stepper.watch.settled_digest,
        broken_state=stepper.broken_state,
        can_go_back=stepper.tail.copy.is_in_front_of(stepper.version),
        can_adopt_in_place=not readers,
        reason=readers[0] if readers else "",
        seconds=time.monotonic() - stepper.built_s,
        classes=() if walk is None else tuple(walk.classes),
        answers="loopback" if walk is None else walk.answers,
        has_first_buckets=stepper.buckets.are_first,
    )
