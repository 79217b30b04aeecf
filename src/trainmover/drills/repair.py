"""A machine that died comes back: its agent registers anew, as somebody's repair would have it do.

Decides how: with the command a user would type, into the same run directory, so that the drill can
hurt it again. What it plays then (a standby) is the controller's decision.
"""

from __future__ import annotations

import os
import subprocess
import sys

from trainmover.drills.harness import MARK, RunningJob
from trainmover.drills.request import JobRequest
from trainmover.errors import DrillFailed

END_LIMIT_S = 20.0


class Repairs:
    """Agents started by hand beside a running job. Leaving the block expects that they ended."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._agents: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Repairs:
        return self

    def __exit__(self, kind: object, *failure: object) -> None:
        for machine, agent in self._agents:
            try:
                agent.wait(0.0 if kind else END_LIMIT_S)
            except subprocess.TimeoutExpired as error:
                agent.kill()
                agent.wait(END_LIMIT_S)
                if kind is None:
                    raise DrillFailed(f"the agent of {machine} outlives the job") from error

    def bring_back(self, machine: str) -> None:
        """Start an agent for a machine that was killed. Does not wait for its READY."""
        job = self._job
        command = [sys.executable, "-m", "trainmover.cli", "agent", "--machine", machine]
        command += ["--controller", f"127.0.0.1:{job.operator_port()}"]
        command += ["--run-dir", str(job.directory.path), "--token-file", str(job.directory.token)]
        command += ["--script", str(job.request.script)]
        for name, value in job.request.settings:
            command += ["--set", f"{name}={value}"]
        with (job.folder / f"agent-{machine}.txt").open("ab") as output:
            agent = subprocess.Popen(
                command,
                env=os.environ | _environment(job.request) | {MARK: job.mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._agents.append((machine, agent))


def _environment(request: JobRequest) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **dict(request.environment), **dict(request.disturbance)}
