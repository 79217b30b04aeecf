"""C27: what writes is stopped (SIGSTOP), not dead, and training reaches its end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact
from tests.cases.runs import undisturbed
from tests.cases.tiers import Tiers, steps, wait_for_disks
from tests.holding import FOLDER, held_mark, let_go
from trainmover.drills import victims
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 60


@pytest.mark.long
def test_a_writer_that_is_stopped_delays_the_end_by_a_bound(tmp_path: Path) -> None:
    """What it has not written is in no checkpoint: the numbers are right, the exit code says so."""
    tiers = Tiers(tmp_path)
    patient = (("controller.lost_after_s", "8.0"),)
    wanted = tiers.life(6, "--stop-at", "50", steps=STEPS, settings=patient)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_for_disks(job, 6)
        job.wait_for(
            lambda: (
                "is being" in str((job.status() or {}).get("checkpoint_state"))
                or held_mark(job.folder / FOLDER, 50, 0).exists()
            ),
            "the next one is being written, or none any more",
        )
        victims.send(victims.machine_file(job.directory, "m1").agent_pid, signal.SIGSTOP)
        let_go(job, 50)
        result = job.wait_until_done(90.0)
    assert result.code == exits.NOT_SAVED, result.output
    assert f"step {STEPS}, its last, is in no checkpoint" in result.output
    assert all(step < STEPS for step in steps(tiers.shared))
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)
