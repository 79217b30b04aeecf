"""A whole job that ended in whatever way, and another one that goes on from its checkpoints."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests import tiny
from tests.cases.runs import kill_all
from tests.holding import TRACED, held_behind, let_go, wait_until_held, wait_until_told
from tests.process.snapshots.jobs import sharded

from trainmover.drills.compare import differences
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CADENCE = (("checkpoint.cadence", "every 10 steps"), ("snapshot.cadence", "every 10 steps"))
ARGUMENTS = ("--steps", "100", "--workers", "2")


def kept(wanted: JobRequest, folder: Path, *flags: str) -> JobRequest:
    """The same job with checkpoints."""
    return replace(wanted, flags=("--checkpoints", str(folder), *flags))


def assert_goes_on(result: JobResult, wanted: JobRequest, start: int, folder: Path) -> None:
    """From `start` on, all numbers and the end are those of a job that was never stopped."""
    assert result.code == 0, result.output
    whole = run_undisturbed(wanted, folder / "undisturbed")
    steps = {step for step in result.losses if step >= start}
    assert steps == {step for step in whole.losses if step >= start}
    assert not differences(result.losses, whole.losses)
    assert result.final == whole.final


def killed(wanted: JobRequest, tmp_path: Path, count: int = 1) -> list[str]:
    """Train until there are `count` checkpoints, then lose all machines; their names."""
    with RunningJob(kept(wanted, tmp_path / "ckpt"), tmp_path / "first") as job:
        # Steps may be quicker than the controller's pulse, which then leaves a checkpoint out.
        job.wait_for(lambda: len(committed(tmp_path)) >= count, f"{count} checkpoints")
        kill_all(job)
    return committed(tmp_path)


def first_run(wanted: JobRequest, tmp_path: Path) -> list[str]:
    """`killed`, of a script that waits in the middle for as long as that takes."""
    return killed(replace(wanted, disturbance=held_behind(24)), tmp_path)


def committed(tmp_path: Path) -> list[str]:
    """Names of the checkpoints that count."""
    return sorted(path.parent.name for path in (tmp_path / "ckpt").glob("step-*/MANIFEST.json"))


def second_run(wanted: JobRequest, tmp_path: Path, *flags: str) -> JobResult:
    with RunningJob(kept(wanted, tmp_path / "ckpt", *flags), tmp_path / "second") as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
    return result


def start_step(result: JobResult) -> int:
    """Where the second job says that it starts."""
    line = next(line for line in result.output.splitlines() if "starts from checkpoint" in line)
    return int(line.rsplit(" ", 1)[1])


@pytest.mark.long  # tests/cases/test_restart.py kills a replicated job at the corners of epochs
def test_ddp_in_the_middle_of_an_epoch_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted = tiny.request(*ARGUMENTS, machines=2, standbys=0, settings=CADENCE)
    assert killed(wanted, tmp_path)
    result = second_run(wanted, tmp_path)
    start = start_step(result)
    assert start >= 10
    assert_goes_on(result, wanted, start, tmp_path)


def test_fsdp2_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    wanted = sharded(steps=60, machines=2, standbys=0, settings=CADENCE)
    assert first_run(wanted, tmp_path)
    result = second_run(wanted, tmp_path, "--resume", "required")
    start = start_step(result)
    assert_goes_on(result, wanted, start, tmp_path)


@pytest.mark.long  # short form: tests/cases/test_restart.py
def test_a_corrupt_newest_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    wanted = tiny.request(
        "--steps", "400", "--workers", "2", machines=2, standbys=0, settings=CADENCE
    )
    names = killed(wanted, tmp_path, count=2)
    assert len(names) >= 2
    shard = max((tmp_path / "ckpt" / names[-1]).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    result = second_run(wanted, tmp_path)
    assert f"checkpoint {names[-1]} can't be used" in result.output
    assert_goes_on(result, wanted, start_step(result), tmp_path)


def test_nothing_where_something_was_asked_for_is_an_error(tmp_path: Path) -> None:
    wanted = tiny.request("--steps", "5", machines=1, standbys=0)
    result = second_run(wanted, tmp_path, "--resume", "required")
    assert result.code == exits.BAD_USAGE
    assert result.losses == {}
    assert "Traceback" not in result.output
    result = second_run(wanted, tmp_path, "--resume", "step-00000007")
    assert result.code == exits.BAD_USAGE
    assert "Traceback" not in result.output


def test_ctrl_c_suspends_the_job_and_the_next_one_goes_on(tmp_path: Path) -> None:
    wanted = sharded(machines=2, standbys=0)
    held = replace(wanted, disturbance=held_behind(4), settings=(*wanted.settings, TRACED))
    with RunningJob(kept(held, tmp_path / "ckpt"), tmp_path / "first") as job:
        wait_until_held(job, 4)
        job.signal(signal.SIGINT)
        wait_until_told(job, "StopAtBoundary")
        let_go(job, 4)
        first = job.wait_until_done()
        job.assert_no_leftovers()
    assert first.code == exits.SUSPENDED
    result = second_run(wanted, tmp_path)
    start = start_step(result)
    assert start == max(first.losses) + 1, "no step is lost"
    assert_goes_on(result, wanted, start, tmp_path)


@pytest.mark.parametrize("machines", [pytest.param(1, marks=pytest.mark.long), 3])
def test_another_number_of_ranks_begins_with_the_same_whole_state(
    machines: int, tmp_path: Path
) -> None:
    wanted = sharded(steps=40, machines=2, standbys=0, settings=CADENCE)
    first = with_dump(wanted, tmp_path / "first.jsonl")
    assert first_run(first, tmp_path)
    other = with_dump(replace(wanted, machines=machines), tmp_path / "second.jsonl")
    result = second_run(other, tmp_path)
    assert result.code == 0, result.output
    start = start_step(result)
    before, after = digests(tmp_path / "first.jsonl"), digests(tmp_path / "second.jsonl")
    assert min(after) == start
    assert after[start] == before[start]
    assert set(result.losses) >= set(range(start, 40))


def with_dump(wanted: JobRequest, path: Path) -> JobRequest:
    return replace(wanted, arguments=(*wanted.arguments, "--dump", str(path)))


def digests(path: Path) -> dict[int, str]:
    """Step -> digest of the whole state in front of it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["digest"] for line in lines}
