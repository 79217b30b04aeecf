"""Jobs that back up every step, and what their losses must cost."""

from __future__ import annotations

from pathlib import Path

from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.runner import FINAL_ARGUMENTS
from trainmover.drills.undisturbed import run_undisturbed

SCRIPT = Path(__file__).parents[1] / "scripts" / "backed_up.py"
EVERY_STEP = (("snapshot.increments", "auto"), ("snapshot.increments_kept", "64"))


def backed_up(
    *arguments: str,
    steps: int = 60,
    machines: int = 3,
    standbys: int = 1,
    settings: tuple[tuple[str, str], ...] = EVERY_STEP,
    disturbance: tuple[tuple[str, str], ...] = (),
) -> JobRequest:
    """A small job whose ranks hold what nobody else has. Steps are far quicker than real ones:
    more increments are kept, so that snapshots have the time they need."""
    return JobRequest(
        script=SCRIPT,
        arguments=("--steps", str(steps), *arguments, *FINAL_ARGUMENTS),
        machines=machines,
        standbys=standbys,
        settings=settings,
        disturbance=disturbance,
        limit_s=180.0,
    )


def wait_until_backed_up(job: RunningJob) -> None:
    """Until a snapshot is where it should be, on which every update since can be played."""
    job.wait_for(
        lambda: int((job.status() or {}).get("snapshot_copied_step", -1)) > 0,
        "a snapshot with its copies",
    )


def end(job: RunningJob) -> JobResult:
    result = job.wait_until_done()
    job.assert_no_leftovers()
    assert result.code == 0, result.output
    return result


def assert_nothing_is_lost(
    result: JobResult, wanted: JobRequest, folder: Path, kinds: list[str]
) -> None:
    """Every incident costs no step but the one in flight, and no number is another."""
    found = [(incident.kind, incident.steps_repeated) for incident in result.incidents]
    assert [kind for kind, _ in found] == kinds, (found, result.output)
    assert all(repeated <= 1 for _, repeated in found), found
    comparison = compare(result, run_undisturbed(wanted, folder / "undisturbed"))
    assert comparison.is_identical, comparison.sentence()
