"""An interruption at every collective of a step, in its gate and behind it changes no number.

Each test runs one kind of step twice, undisturbed and with a list of faults; a sweep's faults are
resets of a connection (a new generation, nobody replaced), one for each place of the steps named.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainmover.daemons.records import read_losses
from trainmover.worker.drill_hooks import VARIABLE

SCRIPT = Path(__file__).with_name("step_kinds.py")
STEPS = 8
LIMIT_S = 170.0
MOST_CALLS = 24
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
FAULT = re.compile(r"^step fault: (\w+@\d+:\d+:\w+)$", re.MULTILINE)


@dataclass
class Run:
    """What one job has left."""

    directory: Path
    output: str

    def losses(self) -> dict[int, dict[str, str]]:
        return {step: told.values for step, told in read_losses(self._file("losses")).items()}

    def told_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file("losses").read_text().splitlines()]

    def ranks(self) -> dict[str, Any]:
        found = sorted(self.directory.glob("rank*.json"))
        return {path.stem: json.loads(path.read_text()) for path in found}

    def faults(self) -> list[str]:
        logs = (self.directory / "run" / "logs").glob("**/*")
        return [fault for path in logs if path.is_file() for fault in FAULT.findall(_text(path))]

    def incidents(self) -> list[dict[str, Any]]:
        path = self._file("incidents")
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def _file(self, name: str) -> Path:
        return self.directory / "run" / f"{name}.jsonl"


def _text(path: Path) -> str:
    return path.read_text(errors="replace")


def run(kind: str, directory: Path, faults: str = "", *extra: str, machines: int = 2) -> Run:
    directory.mkdir(parents=True)
    settings = ["worker.does_log_digests=true", "controller.max_incidents=1000"]
    settings += ["controller.max_tries=1000", "worker.does_trace=true"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "trainmover.cli", "run", "--machines", str(machines)]
    command += ["--no-progress", "--run-dir", str(directory / "run"), *options, *extra]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEP_KINDS_OUT": str(directory)}
    process = subprocess.Popen(
        [*command, str(SCRIPT), kind],
        env={**environment, VARIABLE: faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        # Third interrupt: the job kills what it has started.
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"{kind} with {faults} did not end\n{output}\n{_last_moves(directory)}")
    assert process.returncode == 0, f"{output}\n{_last_moves(directory)}"
    return Run(directory, output)


def _last_moves(directory: Path) -> str:
    generations = (directory / "run" / "logs").glob("g*/rank*.log")
    newest = sorted(generations, key=lambda path: path.stat().st_mtime)[-4:]
    texts = [f"== {path}\n" + "\n".join(_text(path).splitlines()[-12:]) for path in newest]
    return "\n".join(texts)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Undisturbed runs, each made once."""

    @cache
    def made(kind: str, machines: int) -> Run:
        directory = tmp_path_factory.mktemp("undisturbed") / f"{kind}-{machines}"
        return run(kind, directory, machines=machines)

    return made


def behind(step: int, rank: int) -> str:
    """What is struck behind the collectives: a gate that was struck may pass, without another
    chance for its tail."""
    return "gate" if (step + rank) % 2 else "tail"


def sweep(steps: Iterable[int], rank: int) -> str:
    """A reset at each place of each of these steps; calls that a step does not have never come."""
    calls = [*map(str, range(1, MOST_CALLS))]
    return ";".join(
        f"reset@{rank}:{step}:{place}" for step in steps for place in [*calls, behind(step, rank)]
    )


def assert_swept(found: Run, steps: Iterable[int], rank: int) -> None:
    """Every collective of these steps was struck, and its gate or its tail."""
    for step in steps:
        prefix = f"reset@{rank}:{step}:"
        places = {
            fault.removeprefix(prefix) for fault in found.faults() if fault.startswith(prefix)
        }
        assert behind(step, rank) in places, (step, places)
        calls = sorted(int(place) for place in places if place.isdigit())
        assert calls == list(range(1, len(calls) + 1)), (step, calls)
        assert calls, step
        assert len(calls) < MOST_CALLS - 1


def assert_identical(found: Run, expected: Run, *, may_miss: tuple[str, ...] = ()) -> None:
    """Every value that was told for a step is the undisturbed one, and none is missing."""
    wanted = expected.losses()
    assert list(wanted) == list(range(STEPS))
    # A step may be told in portions (parts, reduced values); each is one the undisturbed run told.
    portions = [(line["step"], line["values"]) for line in expected.told_lines()]
    for line in found.told_lines():
        alike = (values for step, values in portions if step == line["step"])
        told = {name: v for name, v in line["values"].items() if name not in may_miss}
        assert any(told.items() <= values.items() for values in alike), (
            line,
            found.output,
        )
    told = found.losses()
    assert list(told) == list(range(STEPS)), found.output
    for step, values in wanted.items():
        missing = values.keys() - told[step].keys() - set(may_miss)
        assert not missing, (step, missing)
    assert found.ranks() == expected.ranks()


def check_sweep(
    kind: str,
    undisturbed: Any,
    path: Path,
    *,
    steps: Iterable[int] = range(4),
    rank: int = 1,
    machines: int = 2,
) -> Run:
    expected = undisturbed(kind, machines)
    found = run(kind, path / "swept", sweep(steps, rank), machines=machines)
    assert_identical(found, expected)
    assert_swept(found, steps, rank)
    return found


# ------------------------------------------------------------------ how the model is spread


@pytest.mark.parametrize("rank", [0, 1])
def test_ddp(rank: int, undisturbed: Any, tmp_path: Path) -> None:
    check_sweep("ddp", undisturbed, tmp_path, rank=rank)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_fsdp2(rank: int, undisturbed: Any, tmp_path: Path) -> None:
    check_sweep("fsdp2", undisturbed, tmp_path, rank=rank)


def test_hsdp(undisturbed: Any, tmp_path: Path) -> None:
    check_sweep("hsdp", undisturbed, tmp_path, rank=2, machines=4)


@pytest.mark.parametrize(
    "kind", [pytest.param("ddp_compiled", marks=pytest.mark.long), "fsdp2_compiled"]
)
def test_compiled(kind: str, undisturbed: Any, tmp_path: Path) -> None:
    check_sweep(kind, undisturbed, tmp_path)


# ------------------------------------------------------------------ what a step does


@pytest.mark.parametrize(
    "kind",
    [
        # What the next ones do in parts only.
        *(pytest.param(k, marks=pytest.mark.long) for k in ("scaler", "clip", "accumulation")),
        pytest.param("closure_adamw", marks=pytest.mark.long),
        "scaler_clip",
        "accumulation_no_sync",
        "closure_lbfgs",
        "two_optimizers",
        "ema",
        "batch_norm",
        "callable_form",
        "log_mean",
        "drawn_batches",
        "loader_workers",
    ],
)
def test_kind(kind: str, undisturbed: Any, tmp_path: Path) -> None:
    check_sweep(kind, undisturbed, tmp_path)


def test_ranks_a_step_apart_while_buckets_settle(undisturbed: Any, tmp_path: Path) -> None:
    """Rank 1 has begun its second attempt, in which DDP rebuilds its buckets; rank 0 has not."""
    expected = undisturbed("late_tail", 2)
    found = run("late_tail", tmp_path / "struck", "reset@1:1:1")
    assert_identical(found, expected)
    assert found.faults() == ["reset@1:1:1"]


@pytest.mark.parametrize("step", [0, 2])
def test_back_over_the_gate_of_a_repeated_call(step: int, undisturbed: Any, tmp_path: Path) -> None:
    """The loop body has read its batch before `step.run` repeats it: once all are back in front of
    the gate it reads the same one."""
    expected = undisturbed("callable_late_tail", 2)
    found = run("callable_late_tail", tmp_path / "struck", f"reset@1:{step}:1;reset@1:{step}:tail1")
    assert_identical(found, expected)
    assert len(found.faults()) == 2


def test_an_attempt_that_runs_out_behind_the_cut_over(undisturbed: Any, tmp_path: Path) -> None:
    """Rank 0 makes up for an attempt so late that the next generation is current already: what it
    calls there must not be counted in it. Steps differ, so attempts are never settled."""
    expected = undisturbed("late_evaluation", 2)
    found = run("late_evaluation", tmp_path / "struck", "reset@1:2:1;reset@1:4:1")
    assert_identical(found, expected)
    assert len(found.faults()) == 2


def test_step_without_update(undisturbed: Any, tmp_path: Path) -> None:
    check_sweep("no_update", undisturbed, tmp_path, steps=range(5))


def test_two_parts(undisturbed: Any, tmp_path: Path) -> None:
    """A version for each part: two in a step."""
    check_sweep("gan", undisturbed, tmp_path, steps=range(6))


# ------------------------------------------------------------------ behind the gate


def test_evaluation(undisturbed: Any, tmp_path: Path) -> None:
    """The evaluation's collectives are the first ones behind the boundary it is due at."""
    check_sweep("evaluation", undisturbed, tmp_path, steps=(0, 2, 4))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_tail_collective(rank: int, undisturbed: Any, tmp_path: Path) -> None:
    """The step is repeated and named: from the job's first on, before anybody has seen a tail."""
    expected = undisturbed("tail_collective", 2)
    faults = ";".join(f"reset@{rank}:{step}:tail1" for step in range(4))
    found = run("tail_collective", tmp_path / "swept", faults)
    assert_identical(found, expected)
    assert len(found.faults()) == 4
    text = (found.directory / "run" / "console.jsonl").read_text()
    assert "the update is taken back and the step repeated" in text
    assert "dropped" not in text
    assert "step_kinds.py:" in text


# ------------------------------------------------------------------ a process that is lost


@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        "gan",
        "evaluation",
        *(pytest.param(k, marks=pytest.mark.long) for k in ("scaler_clip", "ema", "batch_norm")),
        pytest.param("log_mean", marks=pytest.mark.long),
        pytest.param("closure_lbfgs_own", marks=pytest.mark.long),
    ],
)
def test_lost_process(kind: str, undisturbed: Any, tmp_path: Path) -> None:
    """Killed in a collective, in the gate and behind it; respawned in place."""
    expected = undisturbed(kind, 2)
    places = [(1, 0, "1"), (0, 1, "2"), (1, 2, "gate"), (0, 3, "tail"), (1, 4, "tail"), (0, 6, "1")]
    faults = [f"kill@{rank}:{step}:{place}" for rank, step, place in places]
    found = run(kind, tmp_path / "lost", ";".join(faults))
    assert_identical(found, expected, may_miss=("state", "mean", "most"))
    assert sorted(found.faults()) == sorted(faults)


FIRST_PLACES = (
    (1, 0, "1"),
    (0, 0, "gate"),
    (0, 1, "1"),
    (1, 1, "tail"),
    (1, 2, "1"),
    (1, 2, "gate"),
    (0, 3, "1"),
    (0, 3, "tail"),
)


@pytest.mark.parametrize(
    ("kind", "machines", "places"),
    [
        ("gan", 3, FIRST_PLACES),
        ("closure_lbfgs_own", 2, ((1, 0, "1"), (0, 1, "2"))),
        *(pytest.param("gan", 2, (p,), marks=pytest.mark.long) for p in FIRST_PLACES),
        pytest.param("closure_lbfgs_own", 3, FIRST_PLACES, marks=pytest.mark.long),
        pytest.param("late_note", 3, ((1, 0, "1"), (0, 1, "2")), marks=pytest.mark.long),
        pytest.param("ddp_static", 3, FIRST_PLACES, marks=pytest.mark.long),
        pytest.param("ddp_views", 3, FIRST_PLACES, marks=pytest.mark.long),
        pytest.param("ddp_inside", 3, FIRST_PLACES, marks=pytest.mark.long),
    ],
)
def test_lost_in_the_first_steps(
    kind: str,
    machines: int,
    places: tuple[tuple[int, int, str], ...],
    undisturbed: Any,
    tmp_path: Path,
) -> None:
    """While DDP lays out its buckets anew, models with different numbers of iterations behind
    them: one after the other, ranks are lost at every place (decision 0013)."""
    faults = [f"kill@{rank}:{step}:{place}" for rank, step, place in places]
    found = run(kind, tmp_path / "lost", ";".join(faults), machines=machines)
    assert_identical(found, undisturbed(kind, machines), may_miss=("state",))
    assert sorted(found.faults()) == sorted(faults)


@pytest.mark.parametrize("kind", ["loops_until_agreed", "asserts_finite"])
def test_what_cannot_run_out_is_undone(kind: str, undisturbed: Any, tmp_path: Path) -> None:
    expected = undisturbed(kind, 2)
    limit = ("--set", "worker.run_out_timeout_s=1")
    faults = "reset@1:1:1;reset@0:3:1;reset@1:4:2"
    found = run(kind, tmp_path / "run out", faults, *limit)
    assert_identical(found, expected, may_miss=("state",))
    assert len(found.faults()) == 3
