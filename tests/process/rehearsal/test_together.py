"""Workers of one standby machine rehearse together: the groups inside the machine are real."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from tests.drill.parallel.kinds import SCRIPT, SMALL
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import FOLDER_WORD, JobRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def request(*flags: str) -> JobRequest:
    """Tensor parallel inside each of two machines, replicated over both, and one standby."""
    arguments = ("train_gpt", *SMALL, "--layers", "2", "--steps", "40", "--workers", "0", *flags)
    return JobRequest(
        script=SCRIPT,
        arguments=(*arguments, "--final", f"{FOLDER_WORD}/final.json"),
        machines=2,
        workers_per_machine=2,
        standbys=1,
        limit_s=200.0,
    )


def test_tensor_parallel_ranks_of_a_machine_talk_to_each_other(tmp_path: Path) -> None:
    wanted = request("--parallel", "tp", "--tensor", "2")
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        standbys = [each for each in (job.status() or {})["standbys"] if each["is_ready"]]
        assert [each["answers"] for each in standbys] == ["recorded"] * 2
        logs = "".join(
            path.read_text(errors="replace")
            for path in job.directory.logs.rglob("*")
            if path.is_file() and any(each["incarnation"] in path.name for each in standbys)
        )
        real = [int(count) for count in re.findall(r"(\d+) collectives inside the machine", logs)]
        assert len(real) == 2
        assert real[0] == real[1] > 10, logs
        assert "loop-back" not in job.output_path.read_text(errors="replace")
        job.kill_machine("m1")
        job.wait_for_incidents(1)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert [incident.kind for incident in result.incidents] == ["standby"]
    tiny.assert_identical(result, replace(wanted, disturbance=()), tmp_path)
