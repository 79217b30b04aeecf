"""The toy as a job: started, resumed, and its undisturbed run, made once per test process."""

from __future__ import annotations

import atexit
import shutil
import signal
import tempfile
import uuid
from functools import cache
from pathlib import Path

from tests.holding import wait_until_told
from tests.waiting import eventually
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.survey import survey
from trainmover.drills import victims
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import FOLDER_WORD, JobRequest, JobResult
from trainmover.protocol.messages import SwitchoverRequest

SCRIPT = Path(__file__).with_name("toy.py")
OUT = f"{FOLDER_WORD}/out"


def request(
    *arguments: str,
    steps: int = 60,
    machines: int = 2,
    standbys: int = 0,
    flags: tuple[str, ...] = (),
    settings: tuple[tuple[str, str], ...] = (),
) -> JobRequest:
    """A job of the toy; its trace lies in ``{folder}/out``."""
    return JobRequest(
        script=SCRIPT,
        arguments=("--out", OUT, "--steps", str(steps), *arguments),
        machines=machines,
        standbys=standbys,
        flags=flags,
        settings=settings,
        limit_s=200.0,
    )


def ask_for_switchover(job: RunningJob, *machines: str, ranks: int) -> None:
    """Of a traced job whose ranks hold: it is prepared, and stops them at their next boundary."""
    request = SwitchoverRequest(request=uuid.uuid4().hex, machines=machines)
    reply = job.operator().request(request)
    assert reply.is_accepted, reply.text
    wait_until_told(job, "RaiseFlag", ranks)


def end(job: RunningJob) -> JobResult:
    """The job has completed and left nothing behind."""
    result = job.wait_until_done()
    job.assert_no_leftovers()
    assert result.code == 0, result.output
    return result


@cache
def undisturbed(arguments: tuple[str, ...], steps: int, machines: int) -> Path:
    """Trace of the same job without faults, standby or checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix="toy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with RunningJob(request(*arguments, steps=steps, machines=machines), folder / "job") as job:
        end(job)
    return folder / "job" / "out"


def committed(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints that count, oldest first."""
    if not checkpoints.exists():
        return []
    found = survey(open_store(str(checkpoints))).committed
    return sorted(each.manifest.step for each in found)


def kill_all(job: RunningJob) -> None:
    """As a power cut would: everything at one stroke, until nothing of it runs."""
    job.signal(signal.SIGKILL)  # first whoever would start the others again

    def is_dead() -> bool:
        left = job.processes()
        victims.end_all(left)
        return not left and job.code is not None

    eventually(is_dead, "nothing of the job runs")


def run_until_checkpoint(wanted: JobRequest, folder: Path, checkpoints: Path, step: int) -> None:
    """Run the job, and kill all of it at one stroke once checkpoint `step` counts."""
    with RunningJob(wanted, folder) as job:
        job.wait_for(
            lambda: step in committed(checkpoints) or None, f"checkpoint {step} counts", 90.0
        )
        kill_all(job)
