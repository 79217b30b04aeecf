"""A rehearsing standby steps back for those who train on the same machine, and comes forward again.

Decides by what means: a nice value where the process may take it back (root, CAP_SYS_NICE or a
sufficient RLIMIT_NICE); else the batch policy, which any process may leave again. SCHED_IDLE is not
used: an unprivileged process can't leave it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

CAP_SYS_NICE = 1 << 23
TASKS = Path("/proc/self/task")
OWN_THREADS = ("trainmover",)
"""Threads that answer peers and the agent keep their priority."""


class Priority:
    """Of the threads of this process that run the script."""

    def __init__(self, step: int) -> None:
        """Step back by `step` nice values; 0: never."""
        self._step = step
        self._nice: int | None = None
        self._is_batch = False

    @property
    def means(self) -> str:
        """How it is lowered at present, for people; empty: it is not."""
        if self._nice is not None:
            return f"nice +{self._step}"
        return "batch policy" if self._is_batch else ""

    def lower(self) -> None:
        """Step back. Does nothing where the system refuses."""
        if self.means or self._step == 0:
            return
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            if _may_return_to(nice):
                for task in _tasks():
                    os.setpriority(os.PRIO_PROCESS, task, nice + self._step)
                self._nice = nice
            elif os.sched_getscheduler(0) == os.SCHED_OTHER:
                for task in _tasks():
                    os.sched_setscheduler(task, os.SCHED_BATCH, os.sched_param(0))
                self._is_batch = True
        except OSError:
            return  # a sandbox may forbid it; the rehearsal only disturbs more

    def restore(self) -> None:
        """Come forward again, all threads that exist by now."""
        nice, self._nice = self._nice, None
        was_batch, self._is_batch = self._is_batch, False
        for task in _tasks() if nice is not None or was_batch else ():
            try:
                if nice is not None:
                    os.setpriority(os.PRIO_PROCESS, task, nice)
                else:
                    os.sched_setscheduler(task, os.SCHED_OTHER, os.sched_param(0))
            except ProcessLookupError:
                continue  # the thread has ended meanwhile


def _may_return_to(nice: int) -> bool:
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20 - nice:
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & CAP_SYS_NICE)
    return False


def _tasks() -> list[int]:
    """Threads of this process that are not ours."""
    found = []
    for task in TASKS.iterdir():
        try:
            name = (task / "comm").read_text()
        except OSError:
            continue  # ended
        if not name.startswith(OWN_THREADS):
            found.append(int(task.name))
    return found
