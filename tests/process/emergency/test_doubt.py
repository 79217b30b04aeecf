"""A loss that can't be trusted: suspect checkpoints, never the latest; no good one goes for one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.holding import held_behind, let_go, wait_until_held
from tests.process.snapshots.jobs import wait_for_complete, wait_until_settled
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.survey import survey
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("nan.py")
OFTEN = (
    ("checkpoint.cadence", "every 10 steps"),
    ("snapshot.cadence", "every 10 steps"),
    ("checkpoint.keep_last", "2"),
)


def job_of(
    folder: Path,
    *arguments: str,
    settings: tuple[tuple[str, str], ...] = OFTEN,
    held: tuple[int, ...] = (),
) -> JobRequest:
    return JobRequest(
        script=SCRIPT,
        arguments=arguments,
        machines=2,
        standbys=0,
        settings=settings,
        flags=("--checkpoints", str(folder / "ckpt")),
        disturbance=held_behind(*held),
        limit_s=120.0,
    )


def checkpoints_of(folder: Path) -> dict[int, bool]:
    """Steps of the checkpoints that count, and whether each is suspect."""
    if not (folder / "ckpt").exists():
        return {}
    found = survey(open_store(str(folder / "ckpt"))).committed
    return {each.manifest.step: each.manifest.is_suspect for each in found}


@pytest.mark.parametrize("bad_rank", [pytest.param(-1, marks=pytest.mark.long), 1])
def test_c137_a_poisoned_checkpoint_is_never_the_latest(bad_rank: int, tmp_path: Path) -> None:
    wanted = job_of(tmp_path, "--bad-rank", str(bad_rank), held=(15, 25, 35, 45))
    with RunningJob(wanted, tmp_path / "first") as job:
        for step in (15, 25, 35):
            wait_until_held(job, step)
            wait_until_settled(job, step - 6)
            let_go(job, step)
        wait_until_held(job, 45)
        job.wait_for(lambda: max(checkpoints_of(tmp_path)) >= 40, "a bad one")
        let_go(job, 45)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code != 0, "the script says that it has failed"
    suspect = checkpoints_of(tmp_path)
    good = [step for step, is_suspect in suspect.items() if not is_suspect]
    assert max(good) == 30, suspect
    assert any(step >= 40 for step in suspect), "bad ones are there, marked"
    assert "is suspect" in result.output
    listed = subprocess.run(
        [sys.executable, "-m", "trainmover.cli", "ckpt", "ls", str(tmp_path / "ckpt"), "--json"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert "suspect" in listed.stdout and json.loads(listed.stdout)
    again = replace(wanted, disturbance=(), arguments=("--steps", "45", "--bad-from", "1000"))
    with RunningJob(again, tmp_path / "second") as job:
        result = job.wait_until_done()
    assert result.code == 0, result.output
    assert min(result.losses) == 30


def test_short_memory_goes_to_disk_and_the_checkpoint_is_made(tmp_path: Path) -> None:
    settings = (*OFTEN, ("snapshot.reserve_bytes", str(1 << 50)))
    arguments = ("--steps", "45", "--bad-from", "1000")
    wanted = job_of(tmp_path, *arguments, settings=settings, held=(15,))
    with RunningJob(wanted, tmp_path / "first") as job:
        job.wait_for(lambda: checkpoints_of(tmp_path), "one in front of the last")
        let_go(job, 15)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert "goes to disk" in result.output and "MiB wanted" in result.output
    found = checkpoints_of(tmp_path)
    assert found and not any(found.values())
    (last,) = (tmp_path / "ckpt").glob("step-0000000045-*")
    shutil.rmtree(last)  # the end itself: from there no step is left to be compared
    with RunningJob(replace(wanted, disturbance=()), tmp_path / "second") as job:
        again = job.wait_until_done()
    assert again.code == 0, again.output
    start = min(again.losses)
    assert start >= 10
    assert {step: again.losses[step] for step in again.losses} == {
        step: result.losses[step] for step in again.losses
    }


def test_a_script_that_fails_leaves_what_it_has_reached(tmp_path: Path) -> None:
    settings = (("checkpoint.cadence", "every 1000 steps"), ("snapshot.cadence", "every 30 steps"))
    wanted = job_of(tmp_path, "--fails", settings=settings, held=(34,))
    with RunningJob(wanted, tmp_path / "first") as job:
        wait_until_held(job, 34)
        saved = wait_for_complete(job, 29)
        let_go(job, 34)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 1
    assert "RuntimeError: something is wrong here" in result.output
    assert checkpoints_of(tmp_path) == {saved: False}
