"""How much time is left once somebody has said that a machine is about to be taken away.

Decides from what is known beforehand: the grace time as its owner has said it, and the end of the
scheduler's allocation. The nearer one counts; 0 means that nobody knows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmover.errors import ConfigError

SETTING: Final = "agent.grace_s"
LONGEST_S: Final = 365 * 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grace:
    """What is known of a machine's end."""

    usual_s: float = 0.0
    """From a notice to the end; 0: not known."""
    ends_at_wall_s: float = 0.0
    """When the scheduler ends the allocation, Unix time; 0: not known."""

    def left_s(self) -> float:
        """Seconds from now, if the notice has come just now; 0: nobody knows."""
        until_end_s = self.ends_at_wall_s - time.time()
        known = [left for left in (self.usual_s, until_end_s) if left > 0]
        return min(known, default=0.0)


def grace_of(settings: Sequence[tuple[str, str]], ends_at_wall_s: float) -> Grace:
    """From a job's flattened settings."""
    return Grace(usual_s=float(dict(settings).get(SETTING, "0")), ends_at_wall_s=ends_at_wall_s)


class NoticeFile:
    """A file by which somebody outside says that this machine is about to be taken away."""

    def __init__(self, text: str, machine: str) -> None:
        self._path = Path(text.replace("{machine}", machine)) if text else None
        self._seen = 0

    def read(self) -> float | None:
        """Seconds that are left if it has been written just now, 0 if it names none; else None."""
        if self._path is None:
            return None
        try:
            written = self._path.stat().st_mtime_ns
            if written == self._seen:
                return None
            words = self._path.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return None  # not there (yet)
        self._seen = written
        return _seconds(words[0]) if words else 0.0

    @property
    def path(self) -> str:
        """For people."""
        return str(self._path)


def _seconds(word: str) -> float:
    try:
        value = float(word)
        return value if 0 < value < LONGEST_S else 0.0
    except ValueError:
        return 0.0  # some providers write the kind of the event: it is a notice all the same


def parse_grace(text: str, name: str) -> float:
    """Seconds above 0. Raises ConfigError naming where they come from."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}: expected seconds above 0, got '{text}'")
    return value
