"""A whole job that is killed and started again goes on as if nothing had happened: EXACT.

Each test is a chain of lives of one job: every life is killed at one stroke (SIGKILL of everything)
behind a checkpoint, the next one resumes from it.
"""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact, samples
from tests.cases.lives import PACE, chain, kill_behind, life
from tests.cases.runs import committed, end, undisturbed
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
PER_EPOCH = 32
"""Batches of an epoch: 500 samples of each of two ranks, in sixteens."""


def test_killed_at_the_corners_of_epochs(tmp_path: Path) -> None:
    """C42, C44, C57, C61: mid-epoch, last batch, end of an epoch, second epoch."""
    steps = 2 * PER_EPOCH + 4
    chain(tmp_path, [15, PER_EPOCH - 1, PER_EPOCH, PER_EPOCH + 1], steps=steps)
    assert_exact(tmp_path / "out", undisturbed((), steps, 2), ranks=2, steps=steps)


def test_killed_with_loader_workers_and_accumulation(tmp_path: Path) -> None:
    """C46, C50: three batches a step, so that an epoch ends inside of one."""
    arguments = ("--workers", "2", "--accumulate", "3")
    chain(tmp_path, [11, 22], *arguments, steps=30)
    assert_exact(tmp_path / "out", undisturbed(arguments, 30, 2), ranks=2, steps=30)


@pytest.mark.long
def test_suspended_by_a_signal_inside_an_accumulation_window(tmp_path: Path) -> None:
    """C50: the window that is open when the signal comes is run to its end, and saved behind it."""
    arguments = ("--workers", "2", "--accumulate", "3", *PACE)
    for number, place in enumerate((6, 15)):
        with RunningJob(life(tmp_path, 99, *arguments, steps=30), tmp_path / f"{number}") as job:
            job.wait_for_step(place)
            job.signal(signal.SIGUSR1)  # each step waits in front of its update
            result = job.wait_until_done()
        assert result.code == exits.SUSPENDED, result.output
        assert len(committed(tmp_path / "checkpoints")) == number + 1
    with RunningJob(life(tmp_path, 99, *arguments, steps=30), tmp_path / "last") as job:
        end(job)
    assert_exact(tmp_path / "out", undisturbed(arguments[:-2], 30, 2), ranks=2, steps=30)


@pytest.mark.long
def test_killed_without_replicas(tmp_path: Path) -> None:
    """Every rank's shard of parameters and moments comes back to its rank."""
    arguments = ("--spread", "fsdp2")
    chain(tmp_path, [9, 20], *arguments, steps=30)
    assert_exact(tmp_path / "out", undisturbed(arguments, 30, 2), ranks=2, steps=30)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """C40: one flipped bit in the newest; the one before is taken, and the reason told."""
    for place in (10, 20):
        kill_behind(
            life(tmp_path, 10, place=place, steps=60), tmp_path / f"{place}", tmp_path, place
        )
    *_, before, newest = committed(tmp_path / "checkpoints")
    (folder,) = (tmp_path / "checkpoints").glob(f"step-{newest:010d}-*")
    (shard,) = folder.glob("rank-00000*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with RunningJob(life(tmp_path, 100, steps=40), tmp_path / "two") as job:
        result = end(job)
    assert f"starts from checkpoint step-{before:010d}" in result.output, result.output
    assert "can't be used" in result.output
    assert_exact(tmp_path / "out", undisturbed((), 60, 2), ranks=2, steps=40, of=60)


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ("step-0000000099-l1-g1", "step-0000000099"),
        ("required", "/checkpoints: a checkpoint was to be restored and can't be"),
    ],
)
def test_what_is_asked_for_and_not_there_is_an_error(
    resume: str, words: str, tmp_path: Path
) -> None:
    """C13: never a silent start from zero."""
    wanted = life(tmp_path, 10, steps=5)
    flags = (*wanted.flags, "--resume", resume)
    with RunningJob(replace(wanted, flags=flags), tmp_path / "job") as job:
        result = job.wait_until_done()
    assert result.code not in (exits.COMPLETED, exits.SCRIPT_FAILED), result.output
    assert words in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_only_broken_checkpoints_are_an_error(tmp_path: Path) -> None:
    """C01, C13: something is there and nothing of it can be used."""
    kill_behind(life(tmp_path, 10, steps=60), tmp_path / "one", tmp_path, 10)
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        (folder / "MANIFEST.json").unlink()
    shutil.rmtree(tmp_path / "out")
    with RunningJob(life(tmp_path, 10, steps=60), tmp_path / "two") as job:
        result = job.wait_until_done()
    assert result.code != exits.COMPLETED, result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_ledger_of_an_epoch(tmp_path: Path) -> None:
    """P3: each sample once, over three lives."""
    steps = 31
    chain(tmp_path, [8, 19], steps=steps)
    seen = samples(tmp_path / "out", 2)
    assert len(seen) == len(set(seen)) == steps * 32
