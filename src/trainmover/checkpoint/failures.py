"""Errors of the storage, as exceptions with a name, the path and what to do; bounded retries.

Decides which errors may pass by themselves. A failed write or fsync spoils the file (the kernel
drops the dirty pages), so what is repeated is always the whole file.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from trainmover.errors import (
    CheckpointError,
    ConfigError,
    StorageDenied,
    StorageFailed,
    StorageFull,
    StorageVanished,
)

T = TypeVar("T")

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
GONE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})
BUGS: Final = (TypeError, AttributeError, NameError, LookupError, AssertionError)
"""Never the storage's fault: passed on as they are."""
HOPELESS: Final = frozenset({errno.EXDEV, errno.ENAMETOOLONG, errno.EISDIR, errno.ELOOP})


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a failed file is written again, and how long in between."""

    attempts: int = 4
    """Attempts in all; 1 never repeats."""
    first_wait_s: float = 0.1
    """Before the second attempt; each further wait is `factor` times longer."""
    factor: float = 3.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_wait_s < 0 or self.factor < 1:
            raise ConfigError(
                f"retries: expected attempts >= 1, first_wait_s >= 0 and factor >= 1, got {self}"
            )


def named(error: BaseException, doing: str, path: str) -> CheckpointError:
    """`error` of the storage as one of ours, with the path and what to do next."""
    if isinstance(error, CheckpointError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    code = f" ({errno.errorcode.get(number, number)})" if number is not None else ""
    text = f"{doing} {path}: {reason or type(error).__name__}{code}"
    if number in FULL:
        return StorageFull(f"{text}; free space there, or keep fewer checkpoints")
    if number in DENIED or isinstance(error, PermissionError):
        return StorageDenied(f"{text}; give this user write access, or remount it writable")
    if number in GONE or isinstance(error, FileNotFoundError):
        return StorageVanished(f"{text}; the directory has gone: mount or make it again")
    return StorageFailed(f"{text}; earlier checkpoints are untouched, the next save tries again")


def may_pass(error: BaseException, *, is_rename: bool = False) -> bool:
    """True where the same call can succeed a moment later.

    A rename refused with EACCES passes (a reader on a share that locks open files, C36); opening
    refused with EACCES does not.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL or number in HOPELESS or isinstance(error, CheckpointError):
        return False
    if number in DENIED:
        return is_rename and number == errno.EACCES
    return number not in GONE


def retrying(
    call: Callable[[], T], retries: Retries, *, doing: str, path: str, is_rename: bool = False
) -> T:
    """The result of `call`, repeated with growing waits while its error may pass.

    Raises:
        CheckpointError: The last error, named.
    """
    wait_s = retries.first_wait_s
    for attempt in range(1, retries.attempts + 1):
        try:
            return call()
        except (ConfigError, *BUGS):
            raise
        except Exception as error:  # object stores raise what they like
            if attempt == retries.attempts or not may_pass(error, is_rename=is_rename):
                raise named(error, doing, path) from error
        time.sleep(wait_s)
        wait_s *= retries.factor
    raise AssertionError("unreachable: the last attempt returns or raises")
