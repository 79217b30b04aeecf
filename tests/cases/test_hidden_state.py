"""Counters that nobody sees, borders of the data, and what a checkpoint refuses to hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact
from tests.cases.runs import end, request, run_until_checkpoint, undisturbed
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
HIDDEN = Path(__file__).with_name("hidden.py")
STEPS = 20


def hidden(
    out: Path, *arguments: str, checkpoints: Path | None = None, every: int = 0
) -> JobRequest:
    """One life of the script on one machine."""
    flags = ("--checkpoints", str(checkpoints)) if checkpoints is not None else ()
    cadence = (("checkpoint.cadence", f"every {every} steps"),) if every else ()
    return JobRequest(
        script=HIDDEN,
        arguments=("--out", str(out), "--steps", str(STEPS), *arguments),
        machines=1,
        standbys=0,
        flags=flags,
        settings=(("snapshot.cadence", "never"), *cadence),
        limit_s=120.0,
    )


@pytest.mark.parametrize(
    "schedule", ["sequential", pytest.param("onecycle", marks=pytest.mark.long)]
)
def test_saving_changes_nothing_and_neither_does_a_restart(schedule: str, tmp_path: Path) -> None:
    """C63, C65: without checkpoints; saved every 5 steps; killed in the warm-up and behind it.

    The last life asks for a longer schedule: the saved one goes on, and that is said.
    """
    words = ("--schedule", schedule)
    with RunningJob(hidden(tmp_path / "a", *words), tmp_path / "alone") as job:
        end(job)
    saved = hidden(tmp_path / "b", *words, checkpoints=tmp_path / "saved", every=5)
    with RunningJob(saved, tmp_path / "saving") as job:
        end(job)
    assert_exact(tmp_path / "b", tmp_path / "a", ranks=1, steps=STEPS)
    place = tmp_path / "kept"
    for number, step in enumerate((4, 11)):
        hold = ("--hold", str(step + 1))
        life = hidden(tmp_path / "c", *words, *hold, checkpoints=place, every=step)
        run_until_checkpoint(life, tmp_path / f"life{number}", place, step)
    longer = (*words, "--total", "60")
    last = hidden(tmp_path / "c", *longer, checkpoints=place, every=STEPS)
    with RunningJob(last, tmp_path / "last") as job:
        result = end(job)
    assert "40 there and 60 here" in result.output
    assert_exact(tmp_path / "c", tmp_path / "a", ranks=1, steps=STEPS)


@pytest.mark.parametrize(
    "kind",
    [
        "path",
        pytest.param("dataclass", marks=pytest.mark.long),
        pytest.param("lambda", marks=pytest.mark.long),
    ],
)
def test_what_only_a_pickle_could_hold_is_refused_by_its_key(kind: str, tmp_path: Path) -> None:
    """C59: before the first step, not at the restore."""
    wanted = hidden(
        tmp_path / "out", "--unsafe", kind, checkpoints=tmp_path / "checkpoints", every=5
    )
    with RunningJob(wanted, tmp_path / "job") as job:
        result = job.wait_until_done()
    assert result.code == exits.SCRIPT_FAILED, result.output
    assert "whereabouts" in result.output
    assert "not plain data" in result.output
    assert result.losses == {}


@pytest.mark.parametrize("samples", ["64", pytest.param("10", marks=pytest.mark.long)])
def test_saved_at_the_border_of_an_epoch_that_ends_with_a_whole_batch(
    samples: str, tmp_path: Path
) -> None:
    """C54: two batches of each rank, or less than one; the next epoch begins."""
    arguments = ("--samples", samples)
    place = tmp_path / "checkpoints"
    made = request(
        *arguments,
        steps=30,
        flags=("--checkpoints", str(place)),
        settings=(("checkpoint.cadence", "every 4 steps"), ("snapshot.cadence", "never")),
    )
    made = replace(made, arguments=("--out", str(tmp_path / "out"), *made.arguments[2:]))
    held = replace(made, arguments=(*made.arguments, "--stop-at", "5"))
    run_until_checkpoint(held, tmp_path / "one", place, 4)
    with RunningJob(made, tmp_path / "two") as job:
        end(job)
    assert_exact(tmp_path / "out", undisturbed(arguments, 30, 2), ranks=2, steps=30)
