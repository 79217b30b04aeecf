"""Scripts that wait between two steps until a test lets them go on, and how tests use that.

A test that acts on a running job has to find it in the middle, however slow the machine is and
however long a standby or a checkpoint takes: a number of steps is no length of time. Behind a step
at which ranks hold, each of them has written all it has to say of that step, too.

Decides where the marks lie and what is waited for; what is done meanwhile is the test's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trainmover
    from trainmover.drills.harness import RunningJob

VARIABLE = "TRAINMOVER_TEST_HOLD"
FOLDER = "holds"
TRACED = ("worker.does_trace", "true")
"""Setting of a job that `wait_until_told` is asked about."""

# --------------------------------------------------------------------------- the script's side


class Hold:
    """Which steps a script waits behind: as its environment says, and as given."""

    def __init__(self, steps: Iterable[int] = (), folder: Path | None = None) -> None:
        """
        Args:
            steps: More of them.
            folder: Where the marks lie if no test harness has started the job.
        """
        marks = os.environ.get("TRAINMOVER_FAULT_MARKS")
        self._folder = Path(marks).parent / FOLDER if marks else folder
        asked = os.environ.get(VARIABLE, "").split(",")
        self._steps = {*steps, *(int(step) for step in asked if step)}

    def behind(self, step: trainmover.Step, rank: int) -> None:
        """Wait here until somebody lets this step go (bounded by the job's own limits)."""
        if self._folder is None or not step.committed or step.index not in self._steps:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        held_mark(self._folder, step.index, rank).touch()
        while not go_mark(self._folder, step.index).exists():
            time.sleep(0.01)


def held_mark(folder: Path, step: int, rank: int) -> Path:
    """There once the rank waits."""
    return folder / f"held-{step}-{rank}"


def go_mark(folder: Path, step: int) -> Path:
    """There once nobody waits any more."""
    return folder / f"go-{step}"


# --------------------------------------------------------------------------- the test's side


def held_behind(*steps: int) -> tuple[tuple[str, str], ...]:
    """For `JobRequest.disturbance`: the undisturbed run waits nowhere."""
    return ((VARIABLE, ",".join(map(str, steps))),)


def wait_until_held(job: RunningJob, step: int, ranks: int = 2) -> None:
    """Until all ranks wait behind `step`."""
    marks = [held_mark(job.folder / FOLDER, step, rank) for rank in range(ranks)]
    job.wait_for(lambda: all(map(Path.exists, marks)), f"all ranks hold behind step {step}", 150.0)


def let_go(job: RunningJob, step: int) -> None:
    """Whoever waits behind `step`, or comes there again, goes on."""
    (job.folder / FOLDER).mkdir(exist_ok=True)
    go_mark(job.folder / FOLDER, step).touch()


def let_run(job: RunningJob, step: int) -> None:
    """The same, and no pauses any more: nothing else is done to this job but waiting."""
    job.let_hurry()
    let_go(job, step)


def wait_until_told(job: RunningJob, message: str, workers: int = 2) -> None:
    """Until `message` (a class of the protocol) has arrived at so many workers of a traced job.

    What was told while ranks hold is what they find at their next gate.
    """
    what = f"{workers} workers have heard {message}"
    job.wait_for(lambda: sum(map(bool, times_told(job, message))) >= workers, what)


def times_told(job: RunningJob, message: str) -> list[int]:
    """How often `message`, and what it caused, stands in each log of a traced job."""
    logs = job.directory.logs.rglob("*.log")
    return [path.read_text(errors="replace").count(f" {message}") for path in logs]
