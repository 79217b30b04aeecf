"""`worker.does_trace`: each move of the lifecycle as a line of the worker's log."""

from __future__ import annotations

import time

from trainmover.worker.events import Tick
from trainmover.worker.lifecycle import Event, Transition


def trace(event: Event, move: Transition) -> None:
    """Print what `event` caused; ticks that changed nothing are left out."""
    if isinstance(event, Tick) and not move.commands:
        return
    what = ", ".join(type(command).__name__ for command in move.commands)
    main = type(move.state.main).__name__
    print(
        f"trace {time.monotonic():.4f} {type(event).__name__} -> {move.reason or '-'} "
        f"[{main}] {what}",
        flush=True,
    )
