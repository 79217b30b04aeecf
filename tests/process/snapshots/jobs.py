"""Jobs whose ranks hold state that nobody else has, and how tests wait for their snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.runner import FINAL_ARGUMENTS
from trainmover.drills.undisturbed import run_undisturbed

SHARDED = Path(__file__).parents[1] / "scripts" / "sharded.py"
OFTEN = ("snapshot.cadence", "every 5 steps")


def sharded(steps: int = 120, **fields: object) -> JobRequest:
    """A small FSDP2 job that takes snapshots often."""
    start = JobRequest(
        script=SHARDED,
        arguments=("--steps", str(steps), *FINAL_ARGUMENTS),
        settings=(OFTEN,),
        limit_s=180.0,
    )
    return replace(start, **fields)  # type: ignore[arg-type]


def wait_for_copies(job: RunningJob, step: int) -> int:
    """Until all copies of a version above `step` are where they should be; the version's step."""

    def newest() -> int | None:
        found = int((job.status() or {}).get("snapshot_copied_step", -1))
        return found if found > step else None

    return job.wait_for(newest, f"copies of a snapshot above step {step}")


def wait_until_settled(job: RunningJob, step: int) -> None:
    """While ranks hold: one version above `step` is left, with its copies; so the next is taken.

    A snapshot that finds two older ones on their way is left out.
    """

    def is_settled() -> bool:
        status = job.status() or {}
        newest = int(status.get("snapshot_step", -1))
        return newest > step and (newest, 1) == (
            status["snapshot_copied_step"],
            status["snapshot_count"],
        )

    job.wait_for(is_settled, f"nothing but a snapshot above step {step} is left")


def wait_for_complete(job: RunningJob, step: int) -> int:
    """Until a version above `step` is complete on all machines; the version's step."""

    def newest() -> int | None:
        status = job.status() or {}
        found = int(status.get("snapshot_step", -1))
        return found if found > step else None

    return job.wait_for(newest, f"a complete snapshot above step {step}")


def wait_for_checkpoint(job: RunningJob, step: int) -> int:
    """Until a checkpoint above `step` is durable; its step."""

    def newest() -> int | None:
        found = int((job.status() or {}).get("checkpoint_step", -1))
        return found if found > step else None

    return job.wait_for(newest, f"a durable checkpoint above step {step}")


def assert_identical(result: JobResult, wanted: JobRequest, folder: Path) -> None:
    """Every loss and the final state are those of the undisturbed run."""
    comparison = compare(result, run_undisturbed(wanted, folder / "undisturbed"))
    assert comparison.is_identical, comparison.sentence()
