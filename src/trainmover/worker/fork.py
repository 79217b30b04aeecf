"""Turns a fresh child of the nursery into a worker: group, log, environment, entry function.

Decides nothing. A log that can't be written (disk full, path gone) loses lines, never the worker:
training must not end because somebody prints.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from trainmover.edges import faults
from trainmover.protocol.nursery import ForkRequest, frame

CRASHED: Final = 70
"""Exit code of a worker whose entry function raised."""
PR_SET_PDEATHSIG: Final = 1
LOG_LOST: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

_libc = ctypes.CDLL(None, use_errno=True)


class LossyFile(io.FileIO):
    """A log file that drops what the disk does not take."""

    def write(self, data: object) -> int:
        """Bytes taken, or dropped."""
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno in LOG_LOST:
                return memoryview(data).nbytes  # type: ignore[arg-type]
            raise


def die_with_parent() -> None:
    """SIGKILL for this process as soon as its parent has ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def load_entry(entry: str) -> Callable[[ForkRequest], int]:
    """The function that a worker runs, from ``module:function``."""
    module, _, name = entry.partition(":")
    function: Callable[[ForkRequest], int] = getattr(importlib.import_module(module), name)
    return function


def become_worker(request: ForkRequest, entry: str, parent: int) -> NoReturn:
    """Turn this fresh child into the worker and run it; ends the process."""
    code = CRASHED
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(CRASHED)
        redirect(request.log_path)
        os.environ.clear()
        os.environ.update(dict(request.environment))
        if request.spec.working_directory:
            os.chdir(request.spec.working_directory)
        faults.reload()
        _use_threads(os.environ.get("OMP_NUM_THREADS", ""))
        code = load_entry(entry)(request)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def redirect(log_path: str) -> None:
    """Input from nowhere, output appended to `log_path` (nowhere if that can't be)."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    log = nowhere
    if log_path:
        try:
            Path(log_path).parent.mkdir(parents=True, exist_ok=True)
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            print(f"no log at {log_path}: {error}", file=sys.stderr)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for descriptor in {nowhere, log}:
        os.close(descriptor)
    sys.stdout, sys.stderr = _lossy(1), _lossy(2)


def _lossy(descriptor: int) -> io.TextIOWrapper:
    raw = LossyFile(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


def _use_threads(text: str) -> None:
    # OpenMP has read its environment long ago, in the nursery.
    if text.isdigit() and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(max(1, int(text)))


def start_by_exec(request: ForkRequest, entry: str) -> int:
    """A worker as a process of its own making, for nurseries that must not fork; its pid."""
    command = [sys.executable, "-m", "trainmover.worker.nursery", "--child", "--entry", entry]
    body = frame(request)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0, close_fds=True)
    assert process.stdin is not None
    process.stdin.write(body)
    process.stdin.close()
    process.returncode = 0  # reaped by the nursery itself, never by this object
    return process.pid
