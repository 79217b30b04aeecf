"""What a person sees while `trainmover run` works: one progress line, and lines that stay.

On a terminal the progress line is redrawn in place; elsewhere (a file, a pipe) it is printed again
when the step has moved on and some seconds have passed.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainmover.cli.worker_logs import WorkerLogs

PLAIN_INTERVAL_S: Final = 5.0
MARKS: Final = {
    "finding": ("note", "yellow"),
    "incident": ("switchover", "cyan"),
    "decision": ("operator", "blue"),
    "warning": ("warning", "yellow"),
    "failure": ("failure", "red"),
    "end": ("end", "bold"),
}


class ConsoleScreen:
    """Screen of an embedded job."""

    def __init__(
        self, logs: WorkerLogs | None, *, shows_progress: bool, stream: TextIO | None = None
    ) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._logs = logs
        self._shows_progress = shows_progress
        self._live: Live | None = None
        self._plain_at = 0.0
        self._plain_text = ""
        if shows_progress and self._console.is_terminal:
            self._live = Live(
                Text("starting"), console=self._console, refresh_per_second=8, transient=True
            )
            self._live.start()

    def line(self, kind: str, text: str) -> None:
        """One line that stays."""
        label, style = MARKS.get(kind, (kind, ""))
        shown = Text(f"[{label}] ", style=style)
        shown.append(text)
        self._console.print(shown)

    def progress(self, status: dict[str, Any], last: dict[str, Any] | None) -> None:
        """The line that changes."""
        self._follow_logs()
        if not self._shows_progress:
            return
        text = progress_text(status, last)
        if self._live is not None:
            self._live.update(Text(text))
        elif text != self._plain_text and time.monotonic() - self._plain_at > PLAIN_INTERVAL_S:
            self._console.print(Text(text))
            self._plain_at, self._plain_text = time.monotonic(), text

    def close(self) -> None:
        """Take the progress line away and print what is left of the logs."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._follow_logs()

    def _follow_logs(self) -> None:
        if self._logs is not None:
            for prefix, line in self._logs.news():
                self._console.print(Text(f"{prefix} {line}"))


def progress_text(status: dict[str, Any], last: dict[str, Any] | None) -> str:
    """Generation, state word, step and loss in one line."""
    parts = [f"g{status.get('generation', 0)}", str(status.get("phase", "?"))]
    step = status.get("step", 0)
    if last is not None:
        step = max(step, last["step"])
    parts.append(f"step {step}")
    if last is not None:
        parts += [f"{name} {readable(value)}" for name, value in last["values"].items()]
    standbys = status.get("standbys", [])
    if standbys:
        ready = sum(bool(standby.get("is_ready")) for standby in standbys)
        parts.append(f"standbys ready {ready}/{len(standbys)}")
    return "  ".join(parts)


def readable(value: str) -> str:
    """A logged value for people; hex floats as decimal numbers."""
    try:
        return f"{float.fromhex(value):.5g}"
    except ValueError:
        return value
