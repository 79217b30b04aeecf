"""How processes and machines leave: `Left`, signals to agents, and what their workers do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from tests import tiny

from trainmover.drills import victims
from trainmover.drills.harness import RunningJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def test_a_leavers_main_ends_through_left_and_its_process_with_0(tmp_path: Path) -> None:
    with RunningJob(tiny.request(), tmp_path / "job") as job:
        job.wait_for_standby()
        pid, incarnation = job.worker(1)
        job.switchover(("m1",))
        job.wait_for(lambda: not psutil.pid_exists(pid), "the leaver ends")
        result = job.wait_until_done()
    assert result.code == 0, result.output
    logs = (tmp_path / "job" / "run" / "logs" / "g1" / "rank1.log").read_text()
    assert f"code behind the loop ran in {pid}" not in logs
    log = (tmp_path / "job" / "run" / "logs" / "controller.log").read_text()
    assert f"worker {incarnation} ended with exit code 0" in log


def test_c79_an_agent_that_is_asked_to_stop_moves_its_rank_first(tmp_path: Path) -> None:
    wanted = tiny.request("--steps", "500", machines=2, standbys=len(ASKING))
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(len(ASKING), 120.0)
        for count, number in enumerate(ASKING, 1):
            machine = job.member(0).machine
            agent = victims.machine_file(job.directory, machine).agent_pid
            victims.send(agent, number)
            job.wait_for_incidents(count)
            assert job.member(0).machine != machine
            job.wait_for(lambda pid=agent: not is_alive(pid), f"agent of {machine} ends", 30.0)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert [incident.kind for incident in result.incidents] == ["planned"] * len(ASKING)
    tiny.assert_identical(result, wanted, tmp_path)


def test_c81_rank_0_is_lost_three_times(tmp_path: Path) -> None:
    wanted = tiny.request("--steps", "500", machines=2, standbys=3)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(3, 120.0)
        for count in (1, 2, 3):
            job.wait_for_step(job.last_step() + 4)
            other = job.member(1).incarnation
            job.kill_machine(job.member(0).machine)
            job.wait_for_incidents(count)
            # C91: who stayed has kept its rank.
            assert job.member(1).incarnation == other
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert "assert" not in result.output.lower()
    tiny.assert_identical(result, wanted, tmp_path)


def test_c98_a_machine_that_wakes_up_late_can_touch_nothing(tmp_path: Path) -> None:
    # Twice what a machine that lives may stand still: no gate passes while one is asleep.
    settings = (("controller.lost_after_s", "6"), ("agent.heartbeat_interval_s", "0.3"))
    wanted = tiny.request("--steps", "500", settings=settings)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.wait_for_step(4)
        asleep = stop_machine(job, "m1")
        job.wait_for_incidents(1, 60.0)
        taken_over = job.member(1)
        assert taken_over.machine == "m4"
        for pid in asleep:
            victims.send(pid, signal.SIGCONT)
        job.wait_for_step(job.last_step() + 20)
        assert job.member(1) == taken_over
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    tiny.assert_identical(result, wanted, tmp_path)


def test_c116_workers_of_a_killed_job_end_within_seconds(tmp_path: Path) -> None:
    with RunningJob(tiny.request("--steps", "2000"), tmp_path / "job") as job:
        job.wait_for_step(3)
        victims.send(job.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30.0
        while job.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [line for line in job.leftovers() if line.startswith("process")] == []


def stop_machine(job: RunningJob, machine: str) -> list[int]:
    """SIGSTOP all that plays a machine; the pids."""
    found = victims.machine_file(job.directory, machine)
    pids = [found.agent_pid, found.nursery_pid, *(pid for _, pid in found.workers)]
    for pid in pids:
        victims.send(pid, signal.SIGSTOP)
    return pids


def is_alive(pid: int) -> bool:
    """Whether the process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
