"""Checkpoints that can't be written cost nothing but themselves: training goes on, same numbers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.holding import held_behind, let_go, let_run, wait_until_held
from tests.process.snapshots.jobs import (
    assert_identical,
    sharded,
    wait_for_checkpoint,
    wait_until_settled,
)

from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CADENCE = (("checkpoint.cadence", "every 10 steps"), ("snapshot.cadence", "every 10 steps"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that is full soon; needs a user who may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_stops_nothing_and_harms_no_earlier_checkpoint(
    small_disk: Path, tmp_path: Path
) -> None:
    held = held_behind(15, 25, 35)
    wanted = sharded(steps=80, machines=2, standbys=0, settings=CADENCE, disturbance=held)
    place = small_disk / "checkpoints"
    kept = replace(wanted, flags=("--checkpoints", str(place)))
    with RunningJob(kept, tmp_path / "job") as job:
        wait_until_held(job, 15)
        wait_for_checkpoint(job, 5)
        wait_until_settled(job, 5)
        before = set(place.glob("*/MANIFEST.json"))
        filler = small_disk / "filler"
        fill(filler)
        let_go(job, 15)
        wait_until_held(job, 25)
        state = job.wait_for(
            lambda: "bytes free" in str((job.status() or {}).get("checkpoint_state")),
            "the failure is said",
        )
        assert state
        assert before <= set(place.glob("*/MANIFEST.json"))
        filler.unlink()
        wait_until_settled(job, 15)
        let_go(job, 25)
        wait_until_held(job, 35)
        wait_for_checkpoint(job, 25)  # space again: checkpoints again
        let_run(job, 35)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert result.incidents == ()
    assert_identical(result, wanted, tmp_path)


def test_a_place_that_is_no_directory_is_said_and_training_goes_on(tmp_path: Path) -> None:
    held = held_behind(25)
    wanted = sharded(steps=40, machines=2, standbys=0, settings=CADENCE, disturbance=held)
    (tmp_path / "file").write_text("not a directory")
    place = tmp_path / "file" / "checkpoints"
    kept = replace(wanted, flags=("--checkpoints", str(place), "--resume", "never"))
    with RunningJob(kept, tmp_path / "job") as job:
        job.wait_for(
            lambda: str(place) in str((job.status() or {}).get("checkpoint_state")),
            "the failure is said",
        )
        let_run(job, 25)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == exits.NOT_SAVED, result.output
    assert "step 40, its last, is in no checkpoint (there is none" in result.output
    assert_identical(result, wanted, tmp_path)


def fill(path: Path) -> None:
    """Until nothing fits any more."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return
