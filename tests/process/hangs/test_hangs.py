"""A rank that does not go on: found by its peers, named, replaced; or excused while it saves.

Each job is compared with the same one left alone: no hang costs a number.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests import tiny
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("hanging.py")
STEPS = 120
LIMIT_S = 5.0
RUN_OUT_S = 4.0
PAUSE_S = LIMIT_S + 4.0
"""Beyond the limit, although a peer may come late to where it waits."""
PATIENT_S = PAUSE_S + 6.0
"""Time to run out for one that pauses: it makes use of the rest of its pause only."""


def request(hangs: str, run_out_s: float = RUN_OUT_S) -> JobRequest:
    """Three machines and no standby: whoever is replaced is replaced in place."""
    settings = (
        ("agent.heartbeat_interval_s", "0.3"),
        ("communicator.collective_timeout_s", f"{LIMIT_S:g}"),
        ("communicator.tcp_user_timeout_s", "3"),
        ("controller.report_timeout_s", "4"),
        ("controller.stopped_limit_s", "1.5"),
        ("worker.run_out_timeout_s", f"{run_out_s:g}"),
    )
    wanted = tiny.request("--steps", str(STEPS), machines=3, standbys=0, settings=settings)
    return JobRequest(
        script=SCRIPT,
        arguments=wanted.arguments,
        machines=3,
        standbys=0,
        settings=settings,
        disturbance=(("HANGS", hangs), ("SAVE_S", f"{2 * LIMIT_S}"), ("PAUSE_S", f"{PAUSE_S}")),
        limit_s=200.0,
    )


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_hangs_inside_a_step_are_named_and_cost_no_number(tmp_path: Path) -> None:
    """One sleeps for ever, one never gives the interpreter away; one is stopped."""
    wanted = request("sleeps:20:1,holds:60:2")
    with RunningJob(wanted, tmp_path / "job") as job:
        # Its peers' patience, its time to run out, and the way of a process from a warm one.
        sleeper = job.wait_for_incidents(1, 90.0)[0]
        waited = re.search(r"no data for (\d+) s", sleeper.reason)
        assert waited is not None and int(waited.group(1)) >= LIMIT_S, sleeper
        assert "rank 1" in sleeper.reason and "runs its script" in sleeper.reason, sleeper
        job.wait_for_incidents(2, 60.0)
        job.wait_for_step(job.last_step() + 5)
        pid, _ = job.worker(0)
        os.kill(pid, signal.SIGSTOP)
        job.wait_for_incidents(3, 60.0)
        job.wait_for(lambda: not is_alive(pid), "the stopped process is killed and reaped")
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    for report in result.incidents:
        print(report.kind, report.reason, [c.rank for c in report.culprits])
    blamed = [{culprit.rank for culprit in report.culprits} for report in result.incidents]
    assert blamed == [{1}, {2}, {0}]
    assert "does not answer" in result.incidents[1].reason, result.incidents[1]
    tiny.assert_identical(result, wanted, tmp_path)


def test_h12_a_rank_that_saves_is_left_alone_and_a_slow_one_is_reconnected(tmp_path: Path) -> None:
    """C7: nobody is replaced. Between steps two ranks keep the others waiting for two limits:
    nothing happens. Inside a step one does for longer than the limit: it runs out in time, and the
    same processes go on over new channels."""
    wanted = request("saves:20:0,saves:40:1,pauses:60:0", PATIENT_S)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_step(5)
        before = job.members()
        job.wait_for_step(55, 120.0)
        assert not job.incidents()
        job.wait_for_incidents(1)
        assert job.members() == before
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert [report.kind for report in result.incidents] == ["reconnect"]
    tiny.assert_identical(result, wanted, tmp_path)
