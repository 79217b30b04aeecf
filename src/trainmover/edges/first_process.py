"""What a launcher owes its container: as process 1 it buries orphans, below a shell it warns.

Decides nothing about the job. Process 1 of a PID namespace inherits every orphan, and a shell in
its place passes no signal on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

SHELLS: Final = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"})


def is_first() -> bool:
    """Whether this process is the first one of its PID namespace."""
    return os.getpid() == 1


def bury_orphans(own: Iterable[int]) -> int:
    """Reap dead children that nobody else waits for; `own` are those somebody does."""
    kept = set(own)
    count = 0
    for child in psutil.Process().children():
        if child.pid in kept or not _is_dead(child):
            continue
        try:
            os.waitpid(child.pid, os.WNOHANG)
        except ChildProcessError:
            continue
        count += 1
    return count


def _is_dead(child: psutil.Process) -> bool:
    try:
        return bool(child.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shell_in_front() -> str:
    """What to do about a shell that is process 1 and this one's parent; empty: nothing."""
    if os.getpid() == 1 or os.getppid() != 1:
        return ""
    try:
        name = Path("/proc/1/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    if name not in SHELLS:
        return ""
    return (
        f"process 1 is a shell ({name}), which passes no signals on: a stop signal to the "
        f"container never reaches this job; start it with `exec trainmover run ...`"
    )
