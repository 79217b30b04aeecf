"""Whose fault an exception is: the table, row by row."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from trainmover.errors import DiskLost
from trainmover.worker.blame import MACHINE_ERRNOS, machine_cause


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("number", sorted(MACHINE_ERRNOS))
def test_errors_of_devices_and_disks_are_the_machines(number: int) -> None:
    assert machine_cause(OSError(number, os.strerror(number))).startswith(errno.errorcode[number])


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EEXIST, errno.EPIPE])
def test_other_os_errors_are_the_scripts(number: int) -> None:
    assert machine_cause(OSError(number, os.strerror(number))) == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory"),
        (DiskLost("disk of m1: no agent answers"), "another machine's disk"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "accelerator"),
        (RuntimeError("CUDA error: unspecified launch failure"), "accelerator"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "accelerator"),
        (RuntimeError("CUDA error: out of memory"), "accelerator"),
        (RuntimeError("HIP error: unspecified launch failure"), "accelerator"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "accelerator"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), "accelerator"),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled system error"), "network"),
        (RuntimeError("DataLoader worker (pid 41) is killed by signal: Killed. "), "killed"),
        (RuntimeError("DataLoader worker (pid 41) is killed by signal: Bus error."), "killed"),
        (RuntimeError("unable to write to file: Bus error"), "shared memory"),
    ],
)
def test_machine(error: BaseException, words: str) -> None:
    assert words in machine_cause(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: invalid device ordinal"),
        RuntimeError("DataLoader worker (pid 41) exited unexpectedly with exit code 1."),
        RuntimeError("DataLoader worker (pid(s) 41) exited unexpectedly"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        KeyError("x"),
        AssertionError(),
    ],
)
def test_script(error: BaseException) -> None:
    assert machine_cause(error) == ""


def test_what_an_exception_comes_from_counts() -> None:
    killed = RuntimeError("DataLoader worker (pid 41) is killed by signal: Killed. ")
    told = caused(RuntimeError("DataLoader worker (pid(s) 41) exited unexpectedly"), killed)
    assert machine_cause(told) == "a loader worker was killed"
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "disk is full" in machine_cause(caused(ValueError("can't save"), full))
    loop = ValueError("a")
    loop.__cause__ = ValueError("b")
    loop.__cause__.__cause__ = loop
    assert machine_cause(loop) == ""
