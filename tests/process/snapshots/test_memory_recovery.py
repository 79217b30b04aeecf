"""Pure FSDP2: nobody else has a lost rank's part. Recovery from agents' memory, same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.holding import held_behind, let_go, let_run, wait_until_held
from tests.process.snapshots.jobs import (
    assert_identical,
    sharded,
    wait_for_complete,
    wait_for_copies,
    wait_until_settled,
)

from trainmover.drills import victims
from trainmover.drills.harness import RunningJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HELD = held_behind(18)
"""Behind a snapshot or two, in front of most steps."""


def test_a_killed_worker_is_respawned_and_all_roll_back(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0, disturbance=HELD)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, 18)
        wait_for_complete(job, 0)
        others = job.member(0).incarnation
        job.kill_worker(1)
        let_run(job, 18)
        (incident,) = job.wait_for_incidents(1)
        assert incident.roles[0].incarnation == others, "who lives keeps its process"
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


@pytest.mark.long  # the next test loses one more
def test_a_lost_machine_is_restored_from_a_peers_memory(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=1, disturbance=HELD)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_held(job, 18)
        wait_for_copies(job, 0)
        job.kill_machine("m1")
        let_run(job, 18)
        (incident,) = job.wait_for_incidents(1)
        assert incident.roles[1].machine == "m2"
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_two_losses_one_after_the_other(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=2, disturbance=held_behind(18, 30, 60))
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(2)
        wait_until_held(job, 18)
        wait_for_copies(job, 0)
        job.kill_machine("m1")
        let_go(job, 18)
        job.wait_for_incidents(1)
        wait_until_held(job, 30)
        wait_until_settled(job, 0)
        let_go(job, 30)
        wait_until_held(job, 60)
        wait_for_copies(job, 30)
        job.kill_machine("m0")
        let_run(job, 60)
        job.wait_for_incidents(2)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_a_lost_agent_costs_no_snapshot_of_living_workers(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0, disturbance=held_behind(18, 60))
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, 18)
        wait_for_complete(job, 0)
        before = job.kill_agent("m1")
        job.wait_for(lambda: agent_of(job, "m1") != before, "another agent", 90.0)
        wait_until_settled(job, 0)
        let_go(job, 18)
        wait_until_held(job, 60)
        wait_for_complete(job, 18)
        job.kill_worker(0)
        let_run(job, 60)
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_the_callable_form_comes_round_to_the_right_step(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0, disturbance=HELD)
    wanted = replace(wanted, arguments=(*wanted.arguments, "--callable"))
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, 18)
        wait_for_complete(job, 0)
        job.kill_worker(1)
        let_run(job, 18)
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


def test_all_workers_die_and_their_machines_memory_has_them(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0, disturbance=HELD)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, 18)
        wait_for_complete(job, 0)
        pids = [job.worker(rank)[0] for rank in (0, 1)]
        for pid in pids:
            victims.kill_worker_process(pid)
        let_run(job, 18)
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert min(result.losses) == 0
    assert_identical(result, wanted, tmp_path)


def agent_of(job: RunningJob, machine: str) -> int:
    """Pid of the agent that has said hello last."""
    return victims.machine_file(job.directory, machine).agent_pid
