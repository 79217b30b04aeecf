"""Giving one process less of a core: a CPU quota of the kernel, or stop and go where there is none.

Decides which means is used and how much is left. Needs the right to make a control group (root);
without it the process is stopped for a share of every short period instead, which is coarser.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Final

from trainmover.drills import victims
from trainmover.errors import DrillFailed

PERIOD_S: Final = 0.02
V1: Final = Path("/sys/fs/cgroup/cpu")
V2: Final = Path("/sys/fs/cgroup")
LEAST_SHARE: Final = 0.05
DISSOLVE_LIMIT_S: Final = 5.0


class CpuQuota:
    """Limits `pid` to `cores` of a core until `end`; `means` says how."""

    def __init__(self, pid: int, cores: float, stopped_share: float) -> None:
        self.pid = pid
        self.means = "stop and go"
        self._group: Path | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        for root, quota in ((V2, _v2_quota(cores)), (V1, _v1_quota(cores))):
            if self._group is None and _is_usable(root):
                self._group = _grouped(root, pid, quota)
        if self._group is not None:
            self.means = f"a quota of {cores:.2f} cores"
            return
        self._thread = threading.Thread(target=self._stop_and_go, args=(stopped_share,))
        self._thread.start()

    def _stop_and_go(self, stopped_share: float) -> None:
        period_s = 5 * PERIOD_S
        while not self._is_over.wait((1 - stopped_share) * period_s):
            victims.send(self.pid, signal.SIGSTOP)
            self._is_over.wait(stopped_share * period_s)
            victims.send(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Lift the limit; the process may be gone."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._group is None:
            return
        _dissolve(self._group)
        self._group = None


def _is_usable(root: Path) -> bool:
    name = "cgroup.controllers" if root == V2 else "cpu.cfs_quota_us"
    has_files = (root / name).is_file() or (root == V1 and (root / "cgroup.procs").is_file())
    return has_files and os.access(root, os.W_OK)


def _v2_quota(cores: float) -> dict[str, str]:
    period = round(1e6 * PERIOD_S)
    return {"cpu.max": f"{round(max(LEAST_SHARE, cores) * period)} {period}"}


def _v1_quota(cores: float) -> dict[str, str]:
    period = round(1e6 * PERIOD_S)
    quota = round(max(LEAST_SHARE, cores) * period)
    return {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}


def _grouped(root: Path, pid: int, quota: dict[str, str]) -> Path | None:
    """A new group with `pid` in it; None where the system refuses."""
    group = root / f"trainmover-bench-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        for name, value in quota.items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        if group.exists():
            group.rmdir()
        return None
    return group


def _dissolve(group: Path) -> None:
    """Remove the group. Raises DrillFailed where a process that ends keeps it for too long."""
    deadline = time.monotonic() + DISSOLVE_LIMIT_S
    while group.exists():
        for line in (group / "cgroup.procs").read_text().split():
            _move_to(group.parent, int(line))
        try:
            group.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise DrillFailed(f"the control group {group} can't be removed: {error}") from error
            time.sleep(PERIOD_S)


def _move_to(group: Path, pid: int) -> None:
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except ProcessLookupError:
        return  # it has ended meanwhile
