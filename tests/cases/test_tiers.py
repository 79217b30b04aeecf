"""Machines' disks first, the storage of all in the background: EXACT from whichever has it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact
from tests.cases.held_storage import HeldStorage
from tests.cases.runs import end, kill_all, undisturbed
from tests.cases.tiers import (
    Tiers,
    committed,
    flip,
    line_of,
    steps,
    wait_for_disks,
    wait_for_storage,
)
from tests.holding import let_go
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 40
HUNG = re.compile("no progress|has not written its part within")
"""As the agent says it, or the controller, if it loses patience first."""


def test_a_restart_takes_the_newest_of_both_tiers_and_mends_one_with_the_other(
    tmp_path: Path,
) -> None:
    """C142: one answer for the group; a file that is corrupt on a disk comes from the storage."""
    tiers = Tiers(tmp_path)
    with RunningJob(tiers.life(8, "--stop-at", "14", steps=STEPS), tmp_path / "one") as job:
        wait_for_storage(job, 8)
        kill_all(job)
    (first,) = steps(tiers.shared)
    assert first in steps(tiers.disk("m0"))
    assert first in steps(tiers.disk("m1"))
    sides = {path.name for path in tiers.disk("m1").glob(f"step-{first:010d}-*/*.msgpack")}
    assert sides == {"rank-00001.msgpack"}, "each machine's own part"
    (newest,) = tiers.shared.glob(f"step-{first:010d}-*")
    shutil.rmtree(newest)  # killed before the copy

    with RunningJob(tiers.life(8, "--stop-at", "22", steps=STEPS), tmp_path / "two") as job:
        wait_for_storage(job, first + 8)
        words = f"files of step-{first:010d}"
        job.wait_for(lambda: words in job.output_path.read_text(), "it has said where from")
        kill_all(job)
        two = job.output_path.read_text()
    served = line_of(two, words)
    assert "from disk of m0" in served
    assert "durable" not in served
    second = steps(tiers.shared)[-1]
    assert second > first
    flip(tiers.disk("m0"), second, "rank-00000.safetensors")

    with RunningJob(tiers.life(STEPS, steps=STEPS), tmp_path / "three") as job:
        result = end(job)
    served = line_of(result.output, f"files of step-{second:010d}")
    assert "1 from durable" in served
    assert "from disk of m1" in served
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)
    # Three lives are one job: what is kept counts over them, and each says what it continues.
    kept = committed(tiers.shared)
    assert len(kept) <= 3
    assert max(len(each.manifest.history) for each in kept) >= 1


@pytest.mark.long
def test_a_full_disk_costs_the_disk_only(small_disk: Path, tmp_path: Path) -> None:
    """B10: the storage gets the checkpoint straight from memory; the event is seen."""
    tiers = Tiers(tmp_path)
    tiers.local.mkdir()
    tiers.disk("m1").symlink_to(small_disk)
    with RunningJob(tiers.life(8, "--stop-at", "14", steps=STEPS), tmp_path / "job") as job:
        wait_for_storage(job, 8)
        failure = str((job.status() or {})["disk_failure"])
        assert "m1: " in failure
        assert "bytes free" in failure
        let_go(job, 14)
        result = end(job)
    assert result.incidents == ()
    assert steps(tiers.shared)[-1] == STEPS
    assert len(steps(tiers.shared)) > 1
    assert steps(tiers.disk("m1")) == []
    told = incidents_of(tmp_path / "job")
    assert "on machines' disks failed, training goes on" in told
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)


@pytest.mark.long
def test_a_full_storage_leaves_the_disks_and_these_restart_the_job(
    small_disk: Path, tmp_path: Path
) -> None:
    """B10, the other way round."""
    tiers = Tiers(tmp_path)
    tiers.shared.symlink_to(small_disk)
    with RunningJob(tiers.life(8, "--stop-at", "14", steps=STEPS), tmp_path / "one") as job:
        wait_for_disks(job, 8)
        job.wait_for(
            lambda: "bytes free" in str((job.status() or {})["checkpoint_state"]) or None,
            "the failure is said",
        )
        kill_all(job)
    assert steps(tiers.shared) == []
    (newest,) = steps(tiers.disk("m0"))
    with RunningJob(tiers.life(STEPS, steps=STEPS), tmp_path / "two") as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == exits.NOT_SAVED, result.output
    assert f"step {STEPS}, its last, is on machines' own disks only (step-" in result.output
    assert f"starts from checkpoint step-{newest:010d}" in result.output
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)


def test_a_storage_that_hangs_stops_neither_training_nor_the_disks(tmp_path: Path) -> None:
    """C27, B10: what writes to the storage hangs in the kernel; abandoned, told, and later well."""
    tiers = Tiers(tmp_path)
    storage = HeldStorage(tmp_path)
    limit = (("checkpoint.write_timeout_s", "4.0"),)
    wanted = tiers.life(8, "--stop-at", "14", "22", steps=60, settings=limit)
    log = tmp_path / "job" / "run" / "logs" / "controller.log"
    with RunningJob(storage.under(wanted, tiers.shared), tmp_path / "job") as job:
        storage.hang()
        wait_for_disks(job, 8)
        let_go(job, 14)
        assert wait_for_disks(job, 9) > 8, "newer ones reach the disks"
        job.wait_for(lambda: HUNG.search(log.read_text()), "the hang is said")
        storage.let_go()
        let_go(job, 22)
        result = end(job)
    assert steps(tiers.shared)[-1] == 60
    assert result.incidents == ()
    assert HUNG.search(incidents_of(tmp_path / "job"))
    assert_exact(tmp_path / "out", undisturbed((), 60, 2), ranks=2, steps=60)


@pytest.mark.long
def test_an_agent_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """C27: another one takes its place, and with it the writing of what comes next."""
    tiers = Tiers(tmp_path)
    with RunningJob(tiers.life(6, steps=60), tmp_path / "job") as job:
        wait_for_disks(job, 6)
        job.wait_for(
            lambda: "is being" in str((job.status() or {}).get("checkpoint_state")) or None,
            "the next one is being written",
        )
        job.kill_agent("m1")
        result = end(job)
    assert steps(tiers.shared)[-1] == 60
    assert result.incidents == ()
    assert not list(tmp_path.glob("*/writing-*")), "leftovers go"
    assert_exact(tmp_path / "out", undisturbed((), 60, 2), ranks=2, steps=60)


# ------------------------------------------------------------------------------------- surroundings


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with no room for anything; needs a user who may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def incidents_of(folder: Path) -> str:
    """What `trainmover incidents` prints of the job in `folder`."""
    words = ["-m", "trainmover.cli", "incidents", "--run-dir", str(folder / "run")]
    command = [sys.executable, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
