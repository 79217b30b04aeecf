"""Mistakes that need several ranks: one clear sentence, exit 1, nothing hangs, no standby used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainmover.drills.harness import JobRequest, JobResult, RunningJob
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("mistaken.py")
ROOT = Path(__file__).parents[3]


def run(mistake: str, folder: Path) -> JobResult:
    wanted = JobRequest(script=SCRIPT, arguments=(mistake,), machines=2, standbys=0)
    with RunningJob(wanted, folder / "job") as job:
        result = job.wait_until_done(120.0)
        job.assert_no_leftovers()
    return result


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("break-one", "rank 1 left the loop at step 5, others wait in gate 5"),
        ("unequal", "rank 0 left the loop at step 5, others wait in gate 5"),
        ("names", "tracks value1: Value, rank 0 value0: Value"),
        ("early", "torch.distributed was used before trainmover.run(main)"),
        ("backend", "new_group(backend='ucc'): under trainmover every group is its own"),
        ("unguarded", "trainmover.run(main) must stand under `if __name__"),
    ],
)
def test_a_mistake_ends_the_job_with_its_sentence(
    mistake: str, sentence: str, tmp_path: Path
) -> None:
    result = run(mistake, tmp_path)
    assert result.code == exits.SCRIPT_FAILED, result.output
    assert sentence in result.output
    assert not result.incidents, "a mistake of the script is no incident"
    if mistake == "unguarded":
        logs = (tmp_path / "job" / "run" / "logs").rglob("rank*.log")
        assert any("run() was reached in a loader worker" in log.read_text() for log in logs)


def test_groups_of_a_torchrun_script_and_a_break_on_all_ranks_work(tmp_path: Path) -> None:
    result = run("groups", tmp_path)
    assert result.code == exits.COMPLETED, result.output
    assert sorted(result.losses) == [0, 1, 2, 3, 4]
    for notice in (
        "init_process_group: the job's group exists already",
        "new_group(backend='gloo') means trainmover's own group",
        "destroy_process_group does nothing",
    ):
        assert result.output.count(notice) == 1, result.output


def test_ctrl_c_in_a_plain_run() -> None:
    script = str(Path(__file__).with_name("faulty.py"))
    process = subprocess.Popen(
        [sys.executable, "-u", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("step 2"))
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert line
    assert "trainmover: interrupted in step" in said
    assert "Traceback" not in errors
    assert process.returncode == exits.INTERRUPTED


def test_the_same_script_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    result = subprocess.run(
        [*command, str(ROOT / "examples" / "train_gpt.py"), "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "2 processes under another launcher, no resilience" in result.stdout
    assert "step 3 loss=" in result.stdout
