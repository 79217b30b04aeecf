"""C71, C73 while the job runs: odd shapes and ties come through a move and a loss, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.cases.runs import ask_for_switchover
from tests.holding import TRACED, held_behind, let_go, let_run, wait_until_held
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest
from trainmover.drills.runner import FINAL_ARGUMENTS
from trainmover.protocol.messages import SwitchoverRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("odd.py")
HELD = (8, 30)
"""Steps that ranks wait behind, for a standby and for the test."""


def request(*arguments: str, machines: int) -> JobRequest:
    """A job of the odd model, and one standby."""
    return JobRequest(
        script=SCRIPT,
        arguments=(*arguments, *FINAL_ARGUMENTS),
        machines=machines,
        standbys=1,
        settings=(TRACED,),
        disturbance=held_behind(*HELD),
        limit_s=200.0,
    )


def test_ties_views_and_scalars(tmp_path: Path) -> None:
    """The script itself asserts in each step that what was tied is one storage still."""
    wanted = request("--steps", "60", machines=2)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_held(job, HELD[0])
        ask_for_switchover(job, "m0", ranks=2)
        let_go(job, HELD[0])
        wait_until_held(job, HELD[1])
        job.wait_for_incidents(1)
        job.kill_worker(1)
        let_run(job, HELD[1])
        job.wait_for_incidents(2)
        result = job.wait_until_done()
    assert result.code == 0, result.output
    assert [incident.kind for incident in result.incidents] == ["planned", "respawn"]
    tiny.assert_identical(result, wanted, tmp_path)


def phase_of(job: RunningJob) -> str:
    return str((job.status() or {}).get("phase"))


@pytest.mark.long
def test_sizes_that_do_not_divide(tmp_path: Path) -> None:
    """FSDP2 over four ranks: the last one's shard of most tensors is empty, and it moves, too."""
    wanted = request("--steps", "60", "--spread", "fsdp2", machines=4)
    with RunningJob(wanted, tmp_path / "job") as job:
        for machine, step in zip(("m3", "m1"), HELD, strict=True):
            wait_until_held(job, step, 4)
            job.wait_for_standby()
            job.operator().request(SwitchoverRequest(request=machine, machines=(machine,)))
            job.wait_for(lambda: "waits for the boundary" in phase_of(job), "it is prepared")
            let_go(job, step)
        result = job.wait_until_done()
    assert result.code == 0, result.output
    assert [incident.kind for incident in result.incidents] == ["planned"] * 2
    tiny.assert_identical(result, wanted, tmp_path)
