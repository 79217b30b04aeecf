"""Instants, durations and byte sizes.

Deciders never read a clock: they are given an `Instant`. Both types are plain integers of
nanoseconds so that a journal replays to the same state on every machine.
"""

from __future__ import annotations

from typing import Final, NewType

Instant = NewType("Instant", int)
"""A point on one process's monotonic clock, in nanoseconds. Never compared across machines."""

Duration = NewType("Duration", int)
"""A length of time in nanoseconds."""

NS_PER_S: Final = 1_000_000_000

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


def seconds(value: float) -> Duration:
    """Duration of `value` seconds, rounded to a nanosecond."""
    return Duration(round(value * NS_PER_S))


def in_seconds(value: Duration | int) -> float:
    """Seconds in `value` nanoseconds."""
    return value / NS_PER_S


def after(now: Instant, delay: Duration) -> Instant:
    """The instant `delay` after `now`."""
    return Instant(now + delay)


def earliest(*instants: Instant | None) -> Instant | None:
    """The earliest of the given instants; None where there is none."""
    known = [instant for instant in instants if instant is not None]
    return min(known) if known else None
