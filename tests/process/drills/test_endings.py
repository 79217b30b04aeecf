"""How jobs end: mistakes of the script, budgets, no machine left, Ctrl-C, the last step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests import tiny

from trainmover.drills import pauses
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = ("--steps", "3000")


@pytest.mark.parametrize("where", [("--raise-import",), ("--raise-at", "0"), ("--raise-at", "7")])
def test_c87_a_mistake_of_the_script_ends_the_job_once(
    where: tuple[str, ...], tmp_path: Path
) -> None:
    with RunningJob(tiny.request("--steps", "40", *where, machines=2), tmp_path / "job") as job:
        result = job.wait_until_done(90.0)
        job.assert_no_leftovers()
    assert result.code == exits.SCRIPT_FAILED
    assert not result.incidents, "no standby is used up for a mistake of the script"
    assert result.output.strip().splitlines()[-1].startswith("ValueError: bad argument")
    assert "Traceback" in result.output


def test_c87_an_error_of_one_machine_costs_that_machine_only(tmp_path: Path) -> None:
    wanted = tiny.request("--steps", "60", "--raise-at", "7", "--raise-on", "m1", machines=2)
    with RunningJob(wanted, tmp_path / "job") as job:
        result = job.wait_until_done(120.0)
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert any(incident.kind == "standby" for incident in result.incidents)


def test_c89_one_incident_uses_up_one_of_the_budget(tmp_path: Path) -> None:
    wanted = tiny.request(*LONG, standbys=0, flags=("--max-restarts", "2"))
    with RunningJob(wanted, tmp_path / "job") as job:
        for count in (1, 2):
            job.wait_for_step(job.last_step() + 4)
            job.kill_worker(count)
            job.wait_for_incidents(count)
        job.wait_for_step(job.last_step() + 4)
        job.kill_worker(3)
        result = job.wait_until_done(60.0)
        job.assert_no_leftovers()
    assert result.code == exits.TOO_MANY_INCIDENTS, result.output
    assert len(result.incidents) == 2


def test_c113_no_machine_within_the_limit_that_was_set(tmp_path: Path) -> None:
    settings = (("controller.machine_wait_s", "3.7"),)
    wanted = tiny.request(*LONG, machines=2, standbys=0, settings=settings)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_step(4)
        struck_s = time.monotonic()
        job.kill_machine("m1")
        job.wait_for(lambda: job.outcome_file() is not None, "the verdict", 30.0)
        took_s = time.monotonic() - struck_s
        result = job.wait_until_done(30.0)
        job.assert_no_leftovers()
    assert result.code == exits.NO_MACHINE, result.output
    assert "rank 1" in result.output
    # Not sooner, and long before the 60 s that nobody has set.
    assert took_s >= 3.7, f"{took_s:.1f} s instead of 3.7 s"


def test_c113_a_stopped_worker_is_replaced_within_the_limit_that_was_set(tmp_path: Path) -> None:
    settings = (("controller.stopped_limit_s", "3.7"), ("agent.heartbeat_interval_s", "0.3"))
    wanted = tiny.request(*LONG, machines=2, standbys=0, settings=settings)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_step(4)
        struck_s = time.monotonic()
        job.stop_worker(1)
        job.wait_for_incidents(1, 40.0)
        took_s = time.monotonic() - struck_s
        job.signal(signal.SIGINT)
        job.wait_until_done(60.0)
    # Not after the 3 s that nobody has set, and long before its peers would have given it up.
    assert took_s >= 3.7, f"{took_s:.1f} s instead of 3.7 s"


def test_c96_standbys_end_with_the_job(tmp_path: Path) -> None:
    wanted = tiny.request("--steps", "60", machines=2, standbys=2)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.let_hurry()
        job.wait_for_step(59)
        result = job.wait_until_done(30.0)
        job.assert_no_leftovers()
    assert result.code == 0, result.output


def test_c96_the_job_ends_while_a_standby_is_on_its_way(tmp_path: Path) -> None:
    faults = "pause=30@prepare:m2"
    wanted = tiny.request("--steps", "160", machines=2, faults=faults)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.request_switchover(("m1",))
        result = job.wait_until_done(90.0)
        job.assert_no_leftovers()
    assert result.code == 0, result.output


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ctrl_c_once_twice_three_times(count: int, tmp_path: Path) -> None:
    with RunningJob(tiny.request(*LONG, machines=2), tmp_path / "job") as job:
        job.wait_for_step(4)
        for _ in range(count):
            job.signal(signal.SIGINT)
            time.sleep(0.02)
        result = job.wait_until_done(40.0)
        job.assert_no_leftovers()
    if count == 1:
        assert result.code == exits.STOPPED_BY_OPERATOR, result.output
    assert result.code != 0


def test_c118_only_the_one_jobs_processes_end(tmp_path: Path) -> None:
    """C83, too: two jobs on one host with their defaults."""
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        first = RunningJob(tiny.request(*LONG, machines=2, standbys=0), tmp_path / "first")
        second = RunningJob(
            tiny.request("--steps", "120", machines=2, standbys=0), tmp_path / "second"
        )
        with first, second:
            first.wait_for_step(3)
            second.wait_for_step(3)
            for _ in range(3):
                first.signal(signal.SIGINT)
            first.wait_until_done(30.0)
            first.assert_no_leftovers()
            assert bystander.poll() is None
            result = second.wait_until_done()
            assert result.code == 0, result.output
            second.assert_no_leftovers()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_c133_logs_of_every_generation_are_kept(tmp_path: Path) -> None:
    arguments = ("--steps", "120", "--noise", "110")
    wanted = tiny.request(*arguments, machines=2, disturbance=(("TINY_DIE", "between:111:1"),))
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.wait_for_step(3)
        job.switchover(("m0",))  # the job lingers in front of its noise and its death
        pauses.let_pass(job.folder, 112)
        job.wait_for_incidents(2)
        result = job.wait_until_done()
        logs = job.directory.logs
        names = sorted(path.name for path in logs.glob("g*"))
        sizes = {path.parent.name: path.stat().st_size for path in logs.glob("g*/rank1.log")}
    assert result.code == 0, result.output
    assert names == ["g1", "g2", "g3"]
    assert sizes["g2"] > 10 << 20, sizes


def test_c102_the_controller_dies_again_and_again(tmp_path: Path) -> None:
    """C83: each time it comes back on its port; training never stops."""
    wanted = tiny.request("--steps", "500", machines=2)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_step(4)
        port = job.operator_port()
        for _ in range(3):
            before, step = job.controller_pid(), job.last_step()
            workers = [job.worker(rank)[0] for rank in (0, 1)]
            job.kill_controller()
            job.wait_for(lambda old=before: job.controller_pid() != old, "it is back", 30.0)
            job.wait_for(lambda: job.status() is not None, "it answers", 30.0)
            job.wait_for_step(step + 3)
            assert [job.worker(rank)[0] for rank in (0, 1)] == workers
        assert job.operator_port() == port
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert not result.incidents
    tiny.assert_identical(result, wanted, tmp_path)


def test_plain_python_runs_the_same_script(tmp_path: Path) -> None:
    final = tmp_path / "final.json"
    command = [sys.executable, str(tiny.SCRIPT), "--steps", "5", "--final", str(final)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert final.exists()
    assert "resilience" in done.stdout + done.stderr


def test_plain_torchrun_runs_the_same_script(tmp_path: Path) -> None:
    final = tmp_path / "final.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(tiny.SCRIPT), "--steps", "5", "--final", str(final)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert final.exists()
    assert not [p for p in psutil.process_iter() if str(final) in _command_of(p)]


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
