"""Cases about signals, grace times and containers (C120, C122, C124, C126, C128, C130)."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from tests.cases import runs
from tests.holding import let_go, wait_until_held, wait_until_told
from tests.process.emergency.jobs import (
    assert_suspended,
    goes_on_exactly,
    held,
    kept,
    slow,
    slow_library,
    steps_of,
)
from tests.process.snapshots.jobs import assert_identical, sharded, wait_for_complete
from tests.waiting import eventually
from trainmover.daemons import processes
from trainmover.drills import victims
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits
from trainmover.protocol.messages import PreemptionNotice

__all__ = ["slow_library"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ORPHANS = Path(__file__).parents[1] / "process" / "emergency" / "orphans.py"
ROUNDS = int(os.environ.get("TRAINMOVER_SIGNAL_ROUNDS", "1"))
"""More for a long run; each is a job of its own."""


@pytest.fixture
def instants() -> random.Random:
    """From a printed seed."""
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    return random.Random(tiny.seed())


@pytest.mark.parametrize(
    ("grace_s", "is_saved", "milliseconds"),
    [(40, True, 500), pytest.param(12, False, 800, marks=pytest.mark.long)],
)
def test_c122_a_slow_save_gets_the_grace_time_and_no_more(
    slow_library: Path, tmp_path: Path, grace_s: int, is_saved: bool, milliseconds: int
) -> None:
    often = (("checkpoint.cadence", "every 20 steps"), ("snapshot.cadence", "every 20 steps"))
    wanted = kept(
        tmp_path,
        steps=4000,
        settings=often,
        environment=(
            ("TRAINMOVER_GRACE_S", str(grace_s)),
            *slow(slow_library, tmp_path, milliseconds),
        ),
    )
    with RunningJob(wanted, tmp_path / "first") as job:
        job.wait_for(lambda: (job.status() or {}).get("checkpoint_step", -1) > 0, "one is durable")
        before = steps_of(tmp_path)
        began = time.monotonic()
        job.signal(signal.SIGTERM)
        result = job.wait_until_done(grace_s + 15.0)
        took_s = time.monotonic() - began
        assert_suspended(result, job)
    assert took_s < grace_s + 5.0, "it has stopped in time"
    after = steps_of(tmp_path)
    if is_saved:
        assert max(after) == max(result.losses) + 1, (after, max(result.losses))
    else:
        assert max(before) in after
        assert "it goes on from the checkpoint of step" in result.output


@pytest.mark.parametrize("number", range(ROUNDS))
def test_c124_agents_that_hear_of_it_at_different_times_save_one_step(
    instants: random.Random, tmp_path: Path, number: int
) -> None:
    draws = [instants.uniform(0.05, 0.5) for _ in range(2 * number + 2)][-2:]
    wanted = kept(tmp_path, "--grace", "60", steps=4000)
    with RunningJob(wanted, tmp_path / "first") as job:
        job.wait_for_step(5)
        agents = [victims.machine_file(job.directory, name).agent_pid for name in ("m0", "m1")]
        victims.send(agents[number % 2], signal.SIGTERM)
        deadline = time.monotonic() + draws[0]
        job.wait_for(lambda: time.monotonic() > deadline, "the drawn instant")
        victims.send(agents[1 - number % 2], signal.SIGTERM)
        result = job.wait_until_done(60.0)
        assert_suspended(result, job)
    found = steps_of(tmp_path)
    assert max(found) == max(result.losses) + 1
    assert result.incidents == ()


def test_c126_signals_at_any_instant_save_a_step_border(
    instants: random.Random, tmp_path: Path
) -> None:
    wanted = kept(tmp_path, "--grace", "60", steps=60)
    # The first signal finds it behind step 2, the last ones in front of its end, or on the way.
    with RunningJob(held(wanted, 2, 55), tmp_path / "first") as job:
        wait_until_held(job, 2)
        job.signal(signal.SIGUSR2)
        wait_until_told(job, "TakeSnapshot -> a snapshot of level 2", 1)
        let_go(job, 2)
        for _ in range(9):
            deadline = time.monotonic() + instants.uniform(0.0, 0.05)
            job.wait_for(lambda at=deadline: time.monotonic() > at, "the drawn instant")
            job.signal(signal.SIGUSR2)
        job.wait_for(lambda: steps_of(tmp_path), "a checkpoint")
        job.signal(signal.SIGUSR1)
        job.signal(signal.SIGUSR1)
        job.signal(signal.SIGTERM)
        job.signal(signal.SIGINT)
        wait_until_told(job, "StopAtBoundary", 1)
        let_go(job, 55)
        result = job.wait_until_done(45.0)
        assert_suspended(result, job)
    assert max(steps_of(tmp_path)) == max(result.losses) + 1, "the second one takes nothing away"
    goes_on_exactly(wanted, tmp_path)


@pytest.mark.long
def test_c130_survivors_keep_what_the_machine_held(tmp_path: Path) -> None:
    """Three ranks, sharded; a notice for one, a second notice while it is served; then it dies."""
    rarely = (("snapshot.cadence", "every 100000 steps"),)
    wanted = sharded(steps=160, machines=3, standbys=1, settings=rarely)
    with RunningJob(held(wanted, 2, 20, 60), tmp_path / "job") as job:
        wait_until_told(job, "TakeSnapshot", 1)
        let_go(job, 2)
        job.wait_for_standby()
        wait_until_held(job, 20, 3)
        first = wait_for_complete(job, 0)
        job.operator().request(PreemptionNotice(request="1", machines=("m1",), grace_s=5.0))
        job.operator().request(PreemptionNotice(request="2", machines=("m2",), grace_s=60.0))
        let_go(job, 20)
        job.wait_for(
            lambda: job.incidents() or (job.status() or {}).get("snapshot_step", -1) > first,
            "moved, or saved",
        )
        processes.kill_machines(job.directory, "m1")  # if it has not gone by itself already
        let_go(job, 60)
        job.wait_for(job.incidents, "it is replaced", 90.0)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    machines = {role.machine for role in result.incidents[-1].roles}
    assert len(machines) == 3
    assert "m1" not in machines
    assert_identical(result, wanted, tmp_path)


# --------------------------------------------------------------------------- containers


def namespace(*flags: str) -> list[str]:
    """A command that starts another in namespaces of its own; skips where that is not allowed."""
    command = ["unshare", *flags]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False).returncode
    ):
        pytest.skip("no namespace can be made here: not shown")
    return command


@pytest.mark.parametrize("shape", ["first", "shell"])
def test_c128_as_process_1_signals_are_heard_and_orphans_buried(shape: str, tmp_path: Path) -> None:
    isolated = namespace("--pid", "--fork", "--mount-proc", "--kill-child")
    wanted = replace(kept(tmp_path, "--grace", "60", steps=4000), script=ORPHANS)
    folder = tmp_path / "first"
    folder.mkdir()
    job = RunningJob(wanted, folder)
    command = job.command()
    if shape == "shell":  # a second command keeps the shell from stepping aside
        command = ["sh", "-c", shlex.join(command) + "; true"]
    output = (folder / "output.txt").open("wb")
    process = subprocess.Popen(
        [*isolated, *command],
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    first = 0
    try:
        wait_until(lambda: job.last_step() >= 5, "five steps")
        (inner,) = children(process.pid)
        first = inner
        if shape == "shell":
            assert "start it with `exec trainmover run" in job.output_path.read_text()
            return
        wait_until(lambda: not dead_children(inner), "every orphan is buried", 15.0)
        os.kill(inner, signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, "it has ended")
        assert process.returncode == exits.SUSPENDED, job.output_path.read_text()
        assert steps_of(tmp_path)
    finally:
        process.kill()
        process.wait(timeout=20)
        eventually(lambda: has_ended(first), "all of its namespace has gone")
        output.close()
        job.directory.clear_runtime()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def dead_children(pid: int) -> list[int]:
    """Zombies among the children of `pid`."""
    return [child for child in children(pid) if state_of(child) == "Z"]


def state_of(pid: int) -> str:
    """Its letter; empty once nobody has that number any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Also where nothing was started."""
    return pid == 0 or state_of(pid) in ("", "Z")


def wait_until(claim: object, what: str, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not claim():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)


def test_c120_a_small_dev_shm_is_said_and_snapshots_do_not_need_it(tmp_path: Path) -> None:
    isolated = namespace("--mount")
    wanted = kept(tmp_path, steps=30, settings=(("checkpoint.cadence", "every 10 steps"),))
    wanted = replace(wanted, arguments=(*wanted.arguments, "--workers", "1"))
    job = RunningJob(wanted, tmp_path / "first")
    job.folder.mkdir()
    inner = "mount -t tmpfs -o size=16m tmpfs /dev/shm && exec " + shlex.join(job.command())
    done = subprocess.run(
        [*isolated, "sh", "-c", inner],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert re.search(r"/dev/shm has 1[0-9] MiB free, expected 64", text), text
    assert steps_of(tmp_path)


def test_c122_the_schedulers_variable_and_wrong_grace_times(tmp_path: Path) -> None:
    script = str(runs.SCRIPT)
    for flags, name in ((["--grace", "soon"], "--grace"), ([], "TRAINMOVER_GRACE_S")):
        done = subprocess.run(
            [sys.executable, "-m", "trainmover.cli", "run", *flags, script],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | ({} if flags else {"TRAINMOVER_GRACE_S": "-3"}),
        )
        assert done.returncode == exits.BAD_USAGE
        assert f"{name}: expected seconds above 0" in done.stderr
        assert "Traceback" not in done.stderr
