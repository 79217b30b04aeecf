"""Where this worker's standard output goes: one file per generation and rank."""

from __future__ import annotations

import os
import sys


def redirect(log_directory: str, generation: int, rank: int) -> str:
    """Send stdout and stderr of this process (and of its later children) to
    `LOG_DIRECTORY/g<generation>/rank<rank>.log`, appended. Returns the path; keeps the old file
    where the directory can't be written: loss of logs never stops training."""
    folder = os.path.join(log_directory, f"g{generation}")
    path = os.path.join(folder, f"rank{rank}.log")
    try:
        os.makedirs(folder, exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"trainmover: log file {path}: {error.strerror}; logs stay where they were")
        return ""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    return path
