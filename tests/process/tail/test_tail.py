"""A loss that strikes a collective behind the update changes no number on any rank.

Per kind of tail one undisturbed job and one in which each rank of three dies once, in front of,
inside and behind such a collective: lines of every rank and told losses are compared byte by byte.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests import tiny
from tests.cases.exact import assert_exact
from tests.cases.runs import ask_for_switchover
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import FOLDER_WORD, JobRequest, JobResult
from trainmover.worker.drill_hooks import VARIABLE

SCRIPT = Path(__file__).with_name("tails.py")
OUT = f"{FOLDER_WORD}/out"
STEPS = 10
RANKS = 3
SETTINGS = (
    ("controller.max_incidents", "100"),
    ("controller.max_tries", "100"),
    ("worker.does_trace", "true"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def request(
    kind: str,
    *arguments: str,
    faults: str = "",
    standbys: int = 0,
    settings: tuple[tuple[str, str], ...] = (),
) -> JobRequest:
    return JobRequest(
        script=SCRIPT,
        arguments=(kind, "--out", OUT, "--steps", str(STEPS), *arguments),
        machines=RANKS,
        standbys=standbys,
        settings=(*SETTINGS, *settings),
        environment=((VARIABLE, faults),) if faults else (),
        limit_s=150.0,
    )


def ended(job: RunningJob) -> JobResult:
    result = job.wait_until_done()
    job.assert_no_leftovers()
    assert result.code == 0, f"{result.output}\n{job.tail()}"
    return result


@cache
def undisturbed(kind: str) -> tuple[Path, dict[int, dict[str, str]]]:
    folder = Path(tempfile.mkdtemp(prefix="tail-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with RunningJob(request(kind), folder / "job") as job:
        result = ended(job)
    return folder / "job" / "out", result.losses


def assert_same(kind: str, folder: Path, result: JobResult) -> None:
    expected, losses = undisturbed(kind)
    assert_exact(folder / "out", expected, ranks=RANKS, steps=STEPS)
    assert result.losses == losses


def let_go(job: RunningJob) -> None:
    (job.folder / "out" / "go").touch()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def findings(folder: Path) -> str:
    return (folder / "run" / "console.jsonl").read_text()


def places(kind: str, first: str, second: str) -> str:
    """Each rank dies once: at the job's first call, then behind a gate and where the kind has a
    second one."""
    draw = random.Random(f"{tiny.seed()} {kind}")
    ranks = draw.sample(range(RANKS), RANKS)
    wheres = [first, *draw.sample([second, "tail"], RANKS - 1)]
    steps = (0, 4, STEPS - 1)
    return ";".join(
        f"kill@{rank}:{step}:{where}"
        for rank, step, where in zip(ranks, steps, wheres, strict=True)
    )


def check(kind: str, faults: str, folder: Path) -> JobResult:
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()} {faults}")
    with RunningJob(request(kind, faults=faults), folder / "job") as job:
        result = ended(job)
    struck = list((folder / "job" / "run" / "logs").glob("**/step-fault-*"))
    assert len(struck) == len(faults.split(";")), (struck, faults)
    assert "the step repeated" in findings(folder / "job")
    assert_same(kind, folder / "job", result)
    return result


@pytest.mark.parametrize("kind", [pytest.param("metric", marks=pytest.mark.long), "behind"])
def test_each_rank_dies_in_its_tail(kind: str, tmp_path: Path) -> None:
    result = check(kind, places(kind, "tail1", "gate"), tmp_path)
    assert all(incident.kind == "respawn" for incident in result.incidents), result.incidents


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "second"),
    [
        ("waiting", "tail2"),
        ("two", "gate"),
        ("adversarial", "tail2"),
        ("callable_form", "tail2"),
    ],
)
def test_other_tails(kind: str, second: str, tmp_path: Path) -> None:
    check(kind, places(kind, "tail1", second), tmp_path)


@pytest.mark.long
def test_sharded_optimizer_state(tmp_path: Path) -> None:
    """ZeRO broadcasts parameters inside of its update. No rank is a replica of another, so a loss
    leads all of them back to the newest snapshot, whatever was invented meanwhile."""
    faults = "kill@1:5:tail2;kill@0:8:tail"
    cadence = (("snapshot.cadence", "every 2 steps"),)
    with RunningJob(request("zero", faults=faults, settings=cadence), tmp_path / "job") as job:
        result = ended(job)
    assert_same("zero", tmp_path / "job", result)


def test_switched_over_and_struck(tmp_path: Path) -> None:
    """A planned move to a standby and a death in a tail, in one job."""
    arguments = ("--hold-at", "6")
    wanted = request("metric", *arguments, faults="kill@1:8:tail1", standbys=1)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        ask_for_switchover(job, job.member(2).machine, ranks=RANKS)
        let_go(job)
        result = ended(job)
    kinds = [incident.kind for incident in result.incidents]
    assert "planned" in kinds, kinds
    assert len(kinds) == 2, kinds
    assert_same("metric", tmp_path / "job", result)


def test_a_rank_that_saves_is_waited_for(tmp_path: Path) -> None:
    """Rank 1 dies while rank 0 saves behind a gate for longer than a report may take."""
    log = tmp_path / "job" / "run" / "logs" / "controller.log"
    with RunningJob(request("saving", "--waits"), tmp_path / "job") as job:
        saver = job.wait_for(
            lambda: job.member(0).incarnation if (job.folder / "out" / "saving").exists() else None,
            "rank 0 saves",
        )
        job.kill_worker(1)
        job.wait_for(
            lambda: [li for li in lines(log) if saver in li and "behind a gate" in li],
            "its report is overdue",
        )
        let_go(job)
        result = ended(job)
    (incident,) = result.incidents
    assert incident.roles[0].incarnation == saver
    assert_same("saving", tmp_path / "job", result)
