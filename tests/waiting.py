"""How tests of real processes wait: for a claim, with a deadline, never for a time.

Decides the polling interval only; what is waited for is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


def eventually(
    claim: Callable[[], T], what: str, *, timeout_s: float = 30.0, poll_s: float = POLL_S
) -> T:
    """The first truthy value of `claim`; AssertionError naming `what` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() > deadline  # read first: this process may have stood still
        value = claim()
        if value:
            return value
        if is_late:
            raise AssertionError(f"not within {timeout_s} s: {what} (last seen: {value!r})")
        time.sleep(poll_s)
