"""An interruption at any collective of a step changes no number, whatever the parallelism.

Per kind one undisturbed job and one with a seeded sample of (rank, step, collective): a connection
is reset there, a new generation begins, nobody is replaced. Steps 0 and 1 are among them: that is
where pipelines agree on shapes and DDP rebuilds its buckets.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests import tiny
from tests.drill.parallel import kinds
from tests.drill.parallel.kinds import Parallel
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.worker.drill_hooks import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 8
STRUCK_STEPS = range(4)
FAULT = re.compile(r"^step fault: (\w+@\d+:\d+:\w+)$", re.MULTILINE)
SETTINGS = (("controller.max_incidents", "1000"), ("controller.max_tries", "1000"))

CALLS = {
    "tp": 22,
    "pp-1f1b": 10,
    "pp-interleaved": 27,
    "pp-uneven": 10,
    "3d": 44,
    "moe": 23,
    "zero": 2,
    "hsdp": 20,
    "ddp": 2,
    "two-modalities": 10,
}
"""Collectives that every rank has in a step, at least."""


def sample(kind: Parallel, count: int) -> list[str]:
    """Per step `count` places of one rank, in order, and its gate."""
    draw = random.Random(f"{tiny.seed()} {kind.name}")
    faults = []
    for step in STRUCK_STEPS:
        rank = draw.randrange(kind.machines)
        calls = sorted(draw.sample(range(1, CALLS[kind.name] + 1), count))
        faults += [f"reset@{rank}:{step}:{call}" for call in calls]
        faults.append(f"reset@{rank}:{step}:gate")
    return faults


def check(kind: Parallel, count: int, folder: Path, *, does_compile: bool = False) -> None:
    """Every fault strikes, and every number is the undisturbed one."""
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    faults = sample(kind, count)
    wanted = kind.request(steps=STEPS, standbys=0, does_compile=does_compile)
    wanted = kinds.changed(wanted, SETTINGS, ((VARIABLE, ";".join(faults)),))
    reference = run_undisturbed(wanted, folder / "undisturbed")
    with RunningJob(wanted, folder / "struck") as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
        logs = [path for path in job.directory.logs.glob("**/*") if path.is_file()]
        texts = [path.read_text(errors="replace") for path in logs]
    struck = {fault for text in texts for fault in FAULT.findall(text)}
    assert result.code == 0, f"{result.output}\n{sorted(struck)}"
    comparison = compare(result, reference)
    assert comparison.is_identical, f"{kind.name}: {comparison.sentence()}; {sorted(struck)}"
    assert struck == set(faults)


@pytest.mark.parametrize(
    "kind",
    [
        kinds.PIPELINE,
        kinds.EXPERTS,
        # Two ranks at every place: tests/process/communicator.
        pytest.param(kinds.TP, marks=pytest.mark.long),
    ],
    ids=lambda k: k.name,
)
def test_some_places(kind: Parallel, tmp_path: Path) -> None:
    check(kind, 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("does_compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", kinds.REPLICATED, ids=lambda k: k.name)
def test_more_places(kind: Parallel, does_compile: bool, tmp_path: Path) -> None:
    check(kind, min(6, CALLS[kind.name]), tmp_path, does_compile=does_compile)


def test_a_death_inside_of_zeros_update(tmp_path: Path) -> None:
    """ZeRO broadcasts parameters behind the gate. The half that loses a rank there has broken
    state; both of its ranks are replaced in place from the other half, which went on."""
    wanted = kinds.ZERO.request(steps=STEPS, standbys=0)
    reference = run_undisturbed(wanted, tmp_path / "undisturbed")
    struck = kinds.changed(wanted, (), ((VARIABLE, "kill@1:3:tail2"),))
    with RunningJob(struck, tmp_path / "struck") as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    comparison = compare(result, reference)
    assert comparison.is_identical, comparison.sentence()
    assert [incident.kind for incident in result.incidents] == ["respawn"]
