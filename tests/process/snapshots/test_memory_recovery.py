"""Pure FSDP2: nobody else has a lost rank's part. Recovery from agents' memory, same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.process.snapshots.jobs import assert_identical, sharded, wait_for_complete

from trainmover.drills.harness import RunningJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_a_killed_worker_is_respawned_and_all_roll_back(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0)
    with RunningJob(wanted, tmp_path / "job") as job:
        step = wait_for_complete(job, 10)
        others = job.member(0).incarnation
        job.wait_for_step(step + 3)
        job.kill_worker(1)
        job.wait_for_incidents(1)
        assert job.member(0).incarnation == others, "who lives keeps its process"
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


@pytest.mark.long  # the next test loses one more
def test_a_lost_machine_is_restored_from_a_peers_memory(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=1)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_for_complete(job, 10)
        job.kill_machine("m1")
        job.wait_for_incidents(1)
        assert job.member(1).machine == "m2"
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_two_losses_one_after_the_other(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=2)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(2)
        wait_for_complete(job, 10)
        job.kill_machine("m1")
        job.wait_for_incidents(1)
        wait_for_complete(job, job.last_step())
        job.kill_machine("m0")
        job.wait_for_incidents(2)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_a_lost_agent_costs_no_snapshot_of_living_workers(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_for_complete(job, 10)
        job.kill_agent("m1")
        wait_for_complete(job, job.last_step())
        job.kill_worker(0)
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_the_callable_form_comes_round_to_the_right_step(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0)
    wanted = replace(wanted, arguments=(*wanted.arguments, "--callable"))
    with RunningJob(wanted, tmp_path / "job") as job:
        step = wait_for_complete(job, 10)
        job.wait_for_step(step + 2)
        job.kill_worker(1)
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_all_workers_die_and_their_machines_memory_has_them(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_for_complete(job, 10)
        for rank in (0, 1):
            job.kill_worker(rank)
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert min(result.losses) == 0
    assert_identical(result, wanted, tmp_path)
