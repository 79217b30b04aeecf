"""A rank that was read in front of `main`: the standby runs the whole script as another rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest
from trainmover.drills.runner import FINAL_ARGUMENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parent / "early" / "early_rank.py"


def test_globals_of_the_script_and_of_its_modules_are_those_of_the_new_rank(tmp_path: Path) -> None:
    start = JobRequest(script=SCRIPT, arguments=("--steps", "90", *FINAL_ARGUMENTS), machines=3)
    wanted = replace(start, standbys=1, limit_s=200.0)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.kill_machine("m2")
        job.wait_for_incidents(1)
        result = job.wait_until_done()
    assert result.code == 0, result.output
    assert [incident.kind for incident in result.incidents] == ["standby"]
    assert "reads the rank in front of main" in result.output
    tiny.assert_identical(result, wanted, tmp_path)
