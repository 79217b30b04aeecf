"""Ranks of equal names and shapes are no replicas of each other if their values say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import FOLDER_WORD, JobRequest
from trainmover.drills.undisturbed import run_undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("same_names.py")


def request(machines: int) -> JobRequest:
    return JobRequest(
        script=SCRIPT,
        arguments=("--final", f"{FOLDER_WORD}/final.json"),
        machines=machines,
        standbys=1,
        limit_s=200.0,
    )


def test_the_true_replica_serves(tmp_path: Path) -> None:
    """Of three ranks with the lost one's names only one has its values."""
    wanted = request(4)
    reference = run_undisturbed(wanted, tmp_path / "undisturbed")
    with RunningJob(wanted, tmp_path / "lost") as job:
        job.wait_for_standby()
        job.wait_for_step(3)
        job.kill_machine(job.member(1).machine)
        job.wait_for_incidents(1, 90.0)
        job.kill_worker(0)
        job.wait_for_incidents(2, 90.0)
        result = job.wait_until_done()
    assert result.code == 0, result.output
    comparison = compare(result, reference)
    assert comparison.is_identical, comparison.sentence()


def test_nobody_serves_where_only_the_names_are_equal(tmp_path: Path) -> None:
    """Back to a snapshot, or to the beginning where none is complete yet; never another's state."""
    wanted = request(2)
    reference = run_undisturbed(wanted, tmp_path / "undisturbed")
    with RunningJob(wanted, tmp_path / "lost") as job:
        job.wait_for_standby()
        job.wait_for_step(3)
        job.kill_machine(job.member(1).machine)
        job.wait_for_incidents(1, 90.0)
        result = job.wait_until_done()
    assert result.code == 0, result.output
    assert {incident.kind for incident in result.incidents} <= {"rollback", "fresh_start"}
    comparison = compare(result, reference)
    assert comparison.is_identical, comparison.sentence()
