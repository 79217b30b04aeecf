"""Everything that is easily forgotten survives a switchover and a loss: EXACT on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.exact import assert_exact, samples
from tests.cases.runs import ask_for_switchover, end, request, undisturbed
from tests.holding import TRACED, let_go, wait_until_held
from trainmover.drills.harness import RunningJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
STEPS = 60

KINDS = [
    pytest.param((), id="plain", marks=pytest.mark.long),
    pytest.param(("--workers", "2", "--accumulate", "3"), id="loader-workers-accumulation"),
]


@pytest.mark.parametrize("arguments", KINDS)
def test_switched_over_and_killed(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """C57, C61: noise drawn in items, scale and growth tracker, in the first and second epoch."""
    held = ("--stop-at", "8", "20")
    wanted = request(*arguments, *held, steps=STEPS, standbys=1, settings=(TRACED,))
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_held(job, 8)
        ask_for_switchover(job, job.member(0).machine, ranks=2)
        let_go(job, 8)
        job.wait_for_incidents(1)
        wait_until_held(job, 20)
        job.kill_worker(1)
        let_go(job, 20)
        job.wait_for_incidents(2)
        result = end(job)
    assert len(result.incidents) == 2, result.output
    assert_exact(tmp_path / "job" / "out", undisturbed(arguments, STEPS, 2), ranks=2, steps=STEPS)


def test_each_sample_once_whatever_happens(tmp_path: Path) -> None:
    """P3: the ledger of the first epoch, over two losses."""
    steps = 31  # 1000 samples, 2 ranks, batches of 16: 31 whole steps of the first epoch
    with RunningJob(request("--stop-at", "4", steps=steps, standbys=1), tmp_path / "job") as job:
        wait_until_held(job, 4)
        job.kill_worker(0)
        let_go(job, 4)
        job.wait_for_incidents(1)
        end(job)
    seen = samples(tmp_path / "job" / "out", 2)
    assert len(seen) == len(set(seen)) == steps * 32
