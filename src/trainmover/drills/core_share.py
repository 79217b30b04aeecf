"""How much of a core processes got, and how long they waited for one: the kernel's own count.

Decides nothing about what is measured. Figures are sums over a process's threads; a thread that
has ended takes its figures with it, so differences are taken over short stretches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Of one process, since its threads began."""

    ran_s: float
    waited_s: float
    """Ready to run, but no core was free."""

    def __sub__(self, before: CoreTime) -> CoreTime:
        ran_s, waited_s = self.ran_s - before.ran_s, self.waited_s - before.waited_s
        return CoreTime(max(0.0, ran_s), max(0.0, waited_s))


def read(pid: int) -> CoreTime | None:
    """Figures of a process now; None where it is gone or the kernel does not count."""
    ran_ns = waited_ns = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            parts = (task / "schedstat").read_text(encoding="ascii").split()
            ran_ns += int(parts[0])
            waited_ns += int(parts[1])
    except (OSError, ValueError, IndexError):
        return None
    return CoreTime(ran_ns / 1e9, waited_ns / 1e9)
