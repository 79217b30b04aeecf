"""How long a test's script pauses in each step: the longer the nearer to its end.

A test acts on a job in the middle of its steps, and a slow machine may let the steps overtake the
test. So a script lingers towards its end (half a minute and more) until the harness says that
nobody acts any more (`trainmover.drills.pauses`); alone, or left alone, it does not.
"""

from __future__ import annotations

import time

from trainmover.drills import pauses

LINGER_STEPS = 60
LINGER_S = (0.2, 0.5, 2.0)
"""In the thirds of the last steps."""
LOOK_S = 0.05


def pause(step: int, steps: int, usual_s: float) -> None:
    """Called in front of, or in, each step of `steps`."""
    if pauses.is_hurried():
        return
    time.sleep(usual_s)
    deadline = time.monotonic() + _linger_s(step, steps) - usual_s
    while time.monotonic() < deadline and not pauses.is_passable(step):
        time.sleep(LOOK_S)


def _linger_s(step: int, steps: int) -> float:
    count = min(LINGER_STEPS, steps // 2)
    place = step - (steps - count)
    return 0.0 if place < 0 else LINGER_S[min(2, 3 * place // max(1, count))]
