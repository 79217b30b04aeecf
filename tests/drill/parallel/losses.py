"""What is done to a job of any layout, and what must come of it.

Decides nothing about layouts (`kinds`). Every wait is for something the job publishes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.drill.parallel.kinds import UNREPLICATED, Parallel
from tests.process.snapshots.jobs import wait_for_complete

from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.undisturbed import run_undisturbed

FIRST_STEP = 3
GAP_STEPS = 3
SLOW_FROM = 40
READY_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Ranks whose machine is switched over, whose machine is killed, and who is killed alone."""

    moved: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    worker: int | None = None
    is_alone: bool = False
    """Nobody has a killed rank's state but the agents that hold its snapshots."""

    @property
    def kinds(self) -> list[str]:
        """Kinds of incident in order."""
        respawn = [] if self.worker is None else ["respawn"]
        return ["planned"] * len(self.moved) + ["standby"] * len(self.killed) + respawn


def carry_out(wanted: JobRequest, plan: Plan, folder: Path) -> JobResult:
    """One job that goes through all of `plan`, one after the other."""
    slow = folder.parent / f"{folder.name}-slow"
    disturbance = (*wanted.disturbance, ("PACED_SLOW", str(slow)))
    with RunningJob(replace(wanted, disturbance=disturbance), folder) as job:
        count = 0
        job.wait_for_step(FIRST_STEP)
        for rank in plan.moved:
            _wait_for_standby(job, slow)
            job.switchover((job.member(rank).machine,))
            count += 1
            _wait(job, count)
        for rank in plan.killed:
            _wait_for_standby(job, slow)
            if plan.is_alone:
                wait_for_complete(job, -1)
            job.kill_machine(job.member(rank).machine)
            count += 1
            _wait(job, count)
        if plan.worker is not None:
            job.kill_worker(plan.worker)
            _wait(job, count + 1)
        job.let_hurry()
        result = job.wait_until_done()
        job.assert_no_leftovers()
    return result


def _wait_for_standby(job: RunningJob, slow: Path) -> None:
    """However long it compiles, steps are left for what comes."""

    def enough() -> bool:
        return job.ready_standbys() != [] or job.last_step() >= SLOW_FROM

    job.wait_for(enough, "a standby, or many steps", READY_S)
    slow.touch()
    job.wait_for_standby(timeout_s=READY_S)
    slow.unlink()


def _wait(job: RunningJob, count: int) -> None:
    job.wait_for_incidents(count, 90.0)
    job.wait_for_step(job.last_step() + GAP_STEPS)


def assert_outlives(kind: Parallel, wanted: JobRequest, plan: Plan, folder: Path) -> None:
    """Every loss and every rank's final state are those of the job left alone."""
    reference = run_undisturbed(wanted, folder / "undisturbed")
    result = carry_out(wanted, plan, folder / "disturbed")
    assert result.code == 0, result.output
    comparison = compare(result, reference)
    assert comparison.is_identical, f"{kind.name}: {comparison.sentence()}"
    assert [incident.kind for incident in result.incidents] == wanted_kinds(kind, plan)


def wanted_kinds(kind: Parallel, plan: Plan) -> list[str]:
    """Without a live replica a loss takes all ranks back to the newest snapshot."""
    is_alone = kind in UNREPLICATED
    return ["rollback" if is_alone and name != "planned" else name for name in plan.kinds]


def assert_stops_by_name(wanted: JobRequest, rank: int, code: int, folder: Path) -> None:
    """A loss that nobody can restore ends the job, and its reason names the rank."""
    with RunningJob(wanted, folder) as job:
        job.wait_for_standby()
        job.wait_for_step(FIRST_STEP)
        job.kill_machine(job.member(rank).machine)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == code, result.output
    assert f"rank {rank}" in result.output
    assert "replica" in result.output
