"""Calls to storage that end in time, whatever the storage does.

A dead network file system leaves a process in a state that not even SIGKILL ends. So the call runs
in a daemon thread that can be abandoned: the caller goes on, and the thread, should it ever wake
up, finds that it has been given up and neither renames nor commits anything.

Decides only about time. What an abandoned call held (its view of the image, one file descriptor)
stays held until the storage answers: an image must not be unmapped before `Watch.has_ended`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainmover.errors import ConfigError, StorageFailed, StorageHung

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long a call to the storage may take."""

    stall_s: float = 60.0
    """Without any byte getting further; a slow disk is not a hung one."""
    total_s: float = 3600.0
    """In all."""

    def __post_init__(self) -> None:
        if not 0 < self.stall_s <= self.total_s:
            raise ConfigError(
                f"limits: expected 0 < stall_s <= total_s, got {self.stall_s}, {self.total_s}"
            )


LOAD_LIMITS = Limits(stall_s=60.0, total_s=600.0)
"""Default of everything that loads."""


class Abandoned(BaseException):
    """Raised inside a call that has been given up; nobody waits for it, nothing retries it."""


class Watch:
    """What a bounded call and its caller share: progress, and whether it has been given up."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_abandoned = False
        self._is_called_off = False
        self._has_ended = False
        self._progress = 0
        self.at = ""
        """Path that the call is busy with, for the message if it hangs."""

    def moved(self, byte_count: int = 1) -> None:
        """Something got further. Raises Abandoned if the caller has given this call up."""
        with self._condition:
            if self._is_abandoned:
                raise Abandoned
            self._progress += byte_count

    def call_off(self) -> None:
        """From any thread: nobody wants the result any more; whoever waits goes on at once."""
        with self._condition:
            self._is_abandoned = self._is_called_off = True
            self._condition.notify_all()

    @property
    def is_called_off(self) -> bool:
        """Whether it is."""
        with self._condition:
            return self._is_called_off

    @property
    def progress(self) -> int:
        """Bytes so far."""
        with self._condition:
            return self._progress

    @property
    def has_ended(self) -> bool:
        """Whether the call's thread has left it, whichever way."""
        with self._condition:
            return self._has_ended

    def end(self) -> None:
        """The call has left its work."""
        with self._condition:
            self._has_ended = True
            self._condition.notify_all()

    def wait(self, limits: Limits) -> bool:
        """True once the call has ended; False, and abandoned, when a limit has passed or it was
        called off."""
        start = moved_at = time.monotonic()
        seen = -1
        with self._condition:
            while not self._has_ended:
                if self._is_abandoned:
                    return False
                now = time.monotonic()
                if self._progress != seen:
                    seen, moved_at = self._progress, now
                left_s = min(moved_at + limits.stall_s, start + limits.total_s) - now
                if left_s <= 0:
                    self._is_abandoned = True
                    return False
                self._condition.wait(min(left_s, 1.0))
        return True


class Relay(Watch):
    """Of a call inside another bounded one: what gets further here gets further there as well."""

    def __init__(self, outer: Watch | None) -> None:
        super().__init__()
        self._outer = outer

    def moved(self, byte_count: int = 1) -> None:
        """As `Watch.moved`, for both."""
        super().moved(byte_count)
        if self._outer is not None:
            self._outer.moved(byte_count)


def bounded(
    work: Callable[[Watch], T], limits: Limits, *, doing: str, watch: Watch | None = None
) -> T:
    """The result of `work`, or StorageHung once a limit has passed.

    Blocks: until `limits`, or until `watch` is called off (StorageFailed); the work itself runs in
    a thread of its own.

    Args:
        work: Calls `watch.moved` as it gets further; its exceptions are passed on.
        limits: Longest silence and longest time.
        doing: For the message: "writing checkpoint x".
        watch: To look at from outside; by default one is made.
    """
    shared = watch or Watch()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(shared))
        except BaseException as error:  # handed to the caller, whatever it is
            errors.append(error)
        finally:
            shared.end()

    threading.Thread(target=run, name="checkpoint-storage", daemon=True).start()
    if not shared.wait(limits):
        if shared.is_called_off:
            raise StorageFailed(f"{doing} was called off")
        raise StorageHung(
            f"{doing}: no progress at {shared.at or 'the store'} within {limits.stall_s} s "
            f"({limits.total_s} s in all); the call is abandoned, earlier checkpoints are "
            "untouched: check the storage"
        )
    if errors:
        raise errors[0]
    return results[0]
