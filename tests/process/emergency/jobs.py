"""Jobs that are about to be taken away: the toy with checkpoints, and slow storage."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import runs
from tests.cases.exact import assert_exact
from tests.holding import TRACED, held_behind
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.protocol import exits

NOT_BY_ITSELF = (("checkpoint.cadence", "every 100000 steps"),)
"""Only a notice makes a checkpoint."""


def kept(folder: Path, *flags: str, steps: int = 60, **fields: object) -> JobRequest:
    """The toy with a place for checkpoints, made by notices only unless `settings` say else."""
    start = runs.request("--pace", "0.02", steps=steps)
    place = ("--checkpoints", str(folder / "ckpt"), *flags)
    return replace(start, **{"flags": place, "settings": NOT_BY_ITSELF, **fields})  # type: ignore[arg-type]


def held(wanted: JobRequest, *steps: int) -> JobRequest:
    """The same, and its ranks wait behind these steps: whatever a test does finds them there."""
    settings = (*wanted.settings, TRACED)
    return replace(wanted, disturbance=held_behind(*steps), settings=settings)


def steps_of(folder: Path) -> list[int]:
    """Steps of the checkpoints that count."""
    return runs.committed(folder / "ckpt")


def assert_suspended(result: JobResult, job: RunningJob) -> None:
    """It says that it can go on, and nothing of it is left."""
    assert result.code == exits.SUSPENDED, result.output
    job.assert_no_leftovers()


def goes_on_exactly(wanted: JobRequest, folder: Path, *, ranks: int = 2, steps: int = 60) -> None:
    """A second job from the checkpoint; both together are the undisturbed run, bit for bit."""
    first, second = folder / "first" / "out", folder / "second" / "out"
    second.mkdir(parents=True)
    for rank in range(ranks):
        shutil.copy(first / f"rank{rank}.jsonl", second)
    calm = replace(wanted, environment=(), disturbance=(), settings=NOT_BY_ITSELF)
    with RunningJob(
        replace(calm, flags=(*wanted.flags, "--resume", "required")), second.parent
    ) as job:
        runs.end(job)
    assert_exact(
        second, runs.undisturbed(("--pace", "0.02"), steps, ranks), ranks=ranks, steps=steps
    )


@pytest.fixture(scope="session")
def slow_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`slow.c`, built."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("slow") / "slow.so"
    source = Path(__file__).with_name("slow.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


def slow(library: Path, folder: Path, milliseconds: int) -> tuple[tuple[str, str], ...]:
    """Environment in which storing a checkpoint takes its time."""
    return (
        ("LD_PRELOAD", str(library)),
        ("SLOW_UNDER", str(folder / "ckpt")),
        ("SLOW_MS", str(milliseconds)),
    )
