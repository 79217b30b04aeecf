"""A daemon that the supervisor has started: its process, its record of restarts, its end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmover.daemons import processes

POLL_S: Final = 0.05


@dataclass(kw_only=True)
class Child:
    """Controller or agent."""

    name: str
    options: Path
    module: str
    process: subprocess.Popen[bytes]
    restarts: int = 0
    is_gone: bool = False
    dead_since: float | None = None
    started_at: float = 0.0

    def let_go(self) -> None:
        """Close its standard input: it takes us for gone, and ends."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def end(self) -> None:
        """Kill it if it still runs; reap it."""
        if self.process.poll() is None:
            processes.send(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.let_go()


def wait_for_ends(children: Sequence[Child], limit_s: float) -> None:
    """Until all have ended, at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(child.process.poll() is not None for child in children):
            return
        time.sleep(POLL_S)


def how_ended(code: int) -> str:
    """``was ended by SIGKILL`` or ``ended with code 3``."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
