"""A rank that does not go on: found by its peers, named, replaced; or excused while it saves.

Each job is compared with the same one left alone: no hang costs a number.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests import tiny
from tests.waiting import eventually
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("hanging.py")
STEPS = 140
LIMIT_S = 5.0
SETTINGS = (
    ("agent.heartbeat_interval_s", "0.3"),
    ("communicator.collective_timeout_s", f"{LIMIT_S:g}"),
    ("communicator.tcp_user_timeout_s", "3"),
    ("controller.report_timeout_s", "3"),
    ("controller.stopped_limit_s", "1.5"),
    ("worker.run_out_timeout_s", "2"),
)


def request(hangs: str = "", save_s: float = 0.0) -> JobRequest:
    """Three machines and no standby: whoever is replaced is replaced in place."""
    wanted = tiny.request("--steps", str(STEPS), machines=3, standbys=0, settings=SETTINGS)
    return JobRequest(
        script=SCRIPT,
        arguments=wanted.arguments,
        machines=3,
        standbys=0,
        settings=SETTINGS,
        disturbance=(("HANGS", hangs), ("SAVE_S", f"{save_s}")),
        limit_s=200.0,
    )


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_hangs_inside_a_step_are_named_and_cost_no_number(tmp_path: Path) -> None:
    """One sleeps for ever, one never gives the interpreter away; one is stopped."""
    wanted = request("sleeps:20:1,holds:60:2")
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_step(19)
        struck_s = time.monotonic()
        job.wait_for_incidents(1, 60.0)
        took_s = time.monotonic() - struck_s
        sleeper, holder = job.incidents()[0], 2
        # Its peers' patience, its time to run out, and the way of a process from a warm one.
        assert LIMIT_S <= took_s < LIMIT_S + 2.0 + 8.0, f"{took_s:.1f} s"
        assert "rank 1" in sleeper.reason and "runs its script" in sleeper.reason, sleeper
        job.wait_for_incidents(holder, 60.0)
        job.wait_for_step(job.last_step() + 5)
        pid, _ = job.worker(0)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for_incidents(3, 60.0)
        assert not is_alive(pid), "the stopped process is killed and reaped"
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    for report in result.incidents:
        print(report.kind, report.reason, [c.rank for c in report.culprits])
    blamed = [{culprit.rank for culprit in report.culprits} for report in result.incidents]
    assert blamed == [{1}, {2}, {0}]
    assert "does not answer" in result.incidents[1].reason, result.incidents[1]
    tiny.assert_identical(result, wanted, tmp_path)


def test_h12_a_rank_that_saves_for_long_is_left_alone(tmp_path: Path) -> None:
    """Between steps for three limits: C7, nobody is replaced, nothing is even reconnected."""
    wanted = request("saves:20:0,saves:40:1", save_s=3 * LIMIT_S)
    with RunningJob(wanted, tmp_path / "job") as job:
        before = eventually(job.members, "all are there", timeout_s=90)
        result_of = job.wait_until_done
        job.wait_for_step(60, 120.0)
        assert job.members() == before
        result = result_of()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert not result.incidents
    tiny.assert_identical(result, wanted, tmp_path)


def test_a_rank_that_is_slow_inside_a_step_costs_a_reconnection_at_most(tmp_path: Path) -> None:
    """It runs out in time and is not replaced: the same processes go on."""
    wanted = request("pauses:20:0", save_s=LIMIT_S + 1.5)
    with RunningJob(wanted, tmp_path / "job") as job:
        before = eventually(job.members, "all are there", timeout_s=90)
        job.wait_for_step(30, 120.0)
        assert job.members() == before
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert [report.kind for report in result.incidents] == ["reconnect"]
    tiny.assert_identical(result, wanted, tmp_path)
