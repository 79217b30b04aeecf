"""Nurseries of all machines played on one host: one process warms up and forks them.

Importing torch once instead of once per machine saves seconds of every start. Each nursery leads a
session of its own, as if its machine's agent had started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from trainmover.daemons import processes
from trainmover.daemons.plan import JobPlan
from trainmover.daemons.run_directory import RunDirectory
from trainmover.edges.launcher import log_tail


class Nurseries:
    """The common parent of a job's nurseries; ends when they have ended."""

    def __init__(self, plan: JobPlan, directory: RunDirectory) -> None:
        self._log_path = directory.logs / "nurseries.log"
        command = [sys.executable, "-m", "trainmover.worker.nursery"]
        command += ["--orphan-timeout-s", str(plan.orphan_timeout_s)]
        command += ["--entry", plan.entry] if plan.entry else []
        command += ["--cold"] if plan.is_cold else []
        for name in plan.machine_names:
            log_path = directory.logs / f"nursery-{name}.log"
            command += ["--socket", str(directory.nursery_socket(name)), "--log", str(log_path)]
        with open(self._log_path, "ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **plan.environment, "OMP_NUM_THREADS": "1"},
            )

    def failure(self) -> str:
        """Why no nursery could be warmed up; empty while all is well."""
        code = self._process.poll()
        if code is None or code <= 0:
            return ""
        lines = log_tail(self._log_path, 4000).strip().splitlines()
        return f"workers can't be started: {lines[-1] if lines else f'code {code}'}"

    def pids(self) -> list[int]:
        """Children of whoever made this."""
        return [self._process.pid]

    def end(self) -> None:
        """Kill what is left of all nurseries and their workers."""
        if self._process.poll() is None:
            for pid in processes.children_of(self._process.pid):
                processes.kill_session(pid, 0)
            processes.send(self._process.pid, signal.SIGKILL)
        self._process.wait()
