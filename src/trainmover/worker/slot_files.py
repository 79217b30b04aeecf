"""Files for snapshots: memory that is reserved up front, or this machine's disk where it is short.

Decides which, by what the machine and its container have left. On disk the step waits until the
snapshot is written (the synchronous form), within a limit; everything behind it is the same, as the
agent maps a file either way. Both have no name, so nothing is left behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmover.edges.memory_left import available_bytes
from trainmover.errors import SnapshotSkipped
from trainmover.units import MIB

RESERVE_BYTES: Final = 256 * MIB
MOST_LATE: Final = 2
"""Disks that have not answered in time are not asked again after so many times."""
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """Limits of one process's snapshots."""

    reserve_bytes: int = RESERVE_BYTES
    """Memory of the machine that snapshots leave alone."""
    disk_directory: str = ""
    """Where they go when memory is short; empty: nowhere."""
    disk_timeout_s: float = 60.0


class SlotFiles:
    """Makes files of one process's slots."""

    def __init__(self, plan: FilePlan, say: Callable[[str], None] = lambda _: None) -> None:
        self._plan = plan
        self._count = 0
        self._late = 0
        self.say = say
        """Told once what is done instead, and why."""
        self._has_said = False

    def open(self, size: int) -> tuple[int, bool]:
        """A file with room for `size` bytes, and whether it is on disk. Raises SnapshotSkipped."""
        left = available_bytes()
        if left is not None and size + self._plan.reserve_bytes > left:
            why = (
                f"no memory for a snapshot: {size / MIB:.0f} MiB wanted, {left / MIB:.0f} MiB "
                f"available, of which {self._plan.reserve_bytes / MIB:.0f} MiB are left alone"
            )
            return self._on_disk(size, why), True
        self._count += 1
        fd = os.memfd_create(f"trainmover-snapshot-{self._count}", os.MFD_CLOEXEC)
        try:
            # Reserved now, refused now: a page that can't be had later is a bus error.
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            if error.errno not in NO_ROOM:
                raise
            why = f"no memory for a snapshot: {size / MIB:.0f} MiB wanted ({error.strerror})"
            return self._on_disk(size, why), True
        return fd, False

    def _on_disk(self, size: int, why: str) -> int:
        folder = self._plan.disk_directory
        if not folder:
            raise SnapshotSkipped(f"{why}; no directory for it is set (snapshot.disk_directory)")
        if self._late >= MOST_LATE:
            raise SnapshotSkipped(f"{why}; the disk at {folder} has been too slow")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                fd = os.dup(file.fileno())
        except OSError as error:
            free = _free_bytes(folder)
            text = f"{why}; {folder} can't take it either: {error.strerror}"
            raise SnapshotSkipped(f"{text}, {free / MIB:.0f} MiB free there") from error
        if not self._has_said:
            self._has_said = True
            self.say(f"{why}; it goes to disk ({folder}), and the step waits for it")
        return fd

    def settle(self, fd: int) -> None:
        """Wait until a file on disk is written. Raises SnapshotSkipped, OSError."""
        failures: list[OSError] = []

        def write() -> None:
            try:
                os.fsync(fd)
            except OSError as error:
                failures.append(error)

        # A disk that hangs must not hold the step for ever; nothing can end such a call.
        thread = threading.Thread(target=write, name="snapshot to disk", daemon=True)
        thread.start()
        thread.join(self._plan.disk_timeout_s)
        if thread.is_alive():
            self._late += 1
            limit, folder = self._plan.disk_timeout_s, self._plan.disk_directory
            raise SnapshotSkipped(f"the disk at {folder} has not written it within {limit:g} s")
        if failures:
            raise failures[0]


def _free_bytes(folder: str) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
