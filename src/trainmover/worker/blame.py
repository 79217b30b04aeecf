"""Whose fault an exception of the script is: the table of what a machine can cause.

An exception that a machine causes is treated as the loss of the worker; any other is the
script's own and ends the job with its traceback.
"""

from __future__ import annotations

import errno
import re

from trainmover.errors import DiskLost

MACHINE_ERRNOS: dict[int, str] = {
    errno.EIO: "a device does not answer",
    errno.ENOSPC: "its disk is full",
    errno.EDQUOT: "its disk quota is used up",
    errno.EROFS: "its disk has become read-only",
    errno.ESTALE: "its network file system has lost a file",
    errno.ENODEV: "a device is gone",
    errno.ENXIO: "a device is gone",
    errno.EREMOTEIO: "a device does not answer",
    errno.ENOMEM: "out of memory",
}
"""Of OSErrors; any other number (ENOENT, EACCES, ...) is the script's own fault."""

SCRIPT = ""

MACHINE_TEXTS: tuple[tuple[str, str], ...] = (
    (r"DataLoader worker \(pid.*\) is killed by signal", "a loader worker was killed"),
    (r"CUDA error: device-side assert", SCRIPT),
    (r"CUDA error: (invalid|no kernel image|operation not)", SCRIPT),
    (r"(CUDA|HIP|XPU) error", "accelerator error"),
    (r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR)", "accelerator error"),
    (r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)", "accelerator error"),
    (r"NCCL error|ncclSystemError|ncclRemoteError", "accelerator network error"),
    (r"out of memory|can't allocate memory|Cannot allocate memory", "out of memory"),
    (r"Bus error|insufficient shared memory", "shared memory exhausted"),
)
"""Pattern of a RuntimeError's message and the cause; an empty cause means the script's own fault.
First match counts. A loader worker that exited by itself (with an exit code) raised: its fault is
the script's."""


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
    if isinstance(error, DiskLost):
        return "another machine's disk gave no answer"
    if isinstance(error, OSError) and error.errno in MACHINE_ERRNOS:
        return f"{errno.errorcode[error.errno]}: {MACHINE_ERRNOS[error.errno]}"
    if isinstance(error, (RuntimeError, OSError)):
        text = str(error)
        for pattern, cause in MACHINE_TEXTS:
            if re.search(pattern, text):
                return cause
    return None
