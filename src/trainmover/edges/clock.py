"""The monotonic clock, read in one place."""

from __future__ import annotations

import time

from trainmover.units import Duration, Instant


def now() -> Instant:
    """This instant on the monotonic clock, which all processes of one machine share."""
    return Instant(time.monotonic_ns())


def seconds_until(instant: Instant) -> float:
    """Seconds from now to `instant`; 0.0 if it has passed."""
    return max(0.0, Duration(instant - now()) / 1e9)
