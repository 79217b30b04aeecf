"""Whose fault an exception of the script is: the table of what a machine can cause.

An exception that a machine causes is treated as the loss of the worker; any other is the
script's own and ends the job with its traceback.
"""

from __future__ import annotations

import errno
import re

MACHINE_ERRNOS = frozenset(
    {
        errno.EIO,
        errno.ENOSPC,
        errno.EROFS,
        errno.ESTALE,
        errno.ENODEV,
        errno.EREMOTEIO,
        errno.ENOMEM,
    }
)

MACHINE_TEXTS: tuple[tuple[str, str], ...] = (
    (
        r"DataLoader worker \(pid\(?s?\)?.*\) (is killed|exited unexpectedly)",
        "a loader worker was killed",
    ),
    (r"CUDA error: (uncorrectable ECC|unspecified launch failure|an illegal)", "accelerator error"),
    (r"CUDA error: device-side assert", ""),
    (r"(CUDA|HIP|XPU) error", "accelerator error"),
    (r"NCCL error|ncclSystemError|ncclRemoteError", "accelerator network error"),
    (r"out of memory|can't allocate memory|Cannot allocate memory", "out of memory"),
    (r"Bus error|insufficient shared memory", "shared memory exhausted"),
)
"""Pattern of the message and the cause; an empty cause means the script's own fault. First match
counts."""


def machine_cause(error: BaseException) -> str:
    """Why a machine is to blame for `error` (or for an exception it came from); empty if not."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        cause = _cause_of(current)
        if cause is not None:
            return cause
        current = current.__cause__ or current.__context__
    return ""


def _cause_of(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        return f"{errno.errorcode[error.errno]}: {error.strerror}"
    if isinstance(error, (RuntimeError, OSError)):
        text = str(error)
        for pattern, cause in MACHINE_TEXTS:
            if re.search(pattern, text):
                return cause
    return None
