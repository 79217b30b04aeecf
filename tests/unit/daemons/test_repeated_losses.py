"""Losses of steps that are done again: compared by step, told once; kept beside checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainmover.daemons.records import JobRecords, LossRecord, read_lines
from trainmover.daemons.repeated_losses import (
    Line,
    LossFile,
    Repeats,
    is_directory,
    loss_path,
    losses_of,
)
from trainmover.protocol.messages import StepLogged

LIMIT_S = 20.0


def record(step: int, lineage: int, **values: str) -> LossRecord:
    return LossRecord(step=step, lineage=lineage, values=values)


def test_equal_losses_are_told_once_behind_the_last_repeated_step() -> None:
    repeats = Repeats("loss")
    for step in (4, 5, 6):
        assert repeats.seen(step, 2, {"loss": f"{step}"}, record(step, 1, loss=f"{step}")) == []
    assert repeats.seen(6, 2, {"mean_loss": "1"}, record(6, 2, loss="6")) == []
    (check,) = repeats.seen(7, 2, {"loss": "7"}, None)
    assert (check.step, check.generation, check.compared, check.differing) == (4, 2, 3, ())
    assert check.text.startswith("steps 4 to 6 done again: 3 values, all equal")
    assert repeats.seen(8, 2, {"loss": "8"}, None) == []


def test_a_stretch_that_ends_with_the_job_is_told_then() -> None:
    repeats = Repeats("loss")
    assert repeats.finish(1) == []
    assert repeats.seen(4, 2, {"loss": "1"}, record(4, 1, loss="1")) == []
    (check,) = repeats.finish(2)
    assert check.text.startswith("step 4 done again: 1 values, all equal")
    assert repeats.finish(2) == []


def test_a_difference_is_told_at_once_and_counted() -> None:
    repeats = Repeats("loss, norm")
    assert repeats.seen(4, 2, {"loss": "1", "rate": "2"}, record(4, 1, loss="1", rate="3")) == []
    (first,) = repeats.seen(5, 2, {"loss": "1", "norm": "9"}, record(5, 1, loss="2", norm="9"))
    assert [(d.name, d.recorded, d.found) for d in first.differing] == [
        ("loss of step 5", "2", "1")
    ]
    assert "does not repeat itself" in first.text
    assert repeats.seen(6, 2, {"loss": "1"}, record(6, 1, loss="2")) == []
    (summary,) = repeats.seen(7, 2, {"loss": "1"}, None)
    assert "2 differ from those before" in summary.text


def test_reduced_values_that_come_a_step_later_are_compared() -> None:
    repeats = Repeats("loss")
    repeats.seen(4, 2, {"loss": "1"}, record(4, 1, loss="1", mean_loss="5"))
    (late,) = repeats.seen(4, 2, {"mean_loss": "6"}, record(4, 2, loss="1"))
    assert late.differing[0].name == "mean_loss of step 4"


def test_the_same_generation_said_twice_is_no_repetition() -> None:
    repeats = Repeats("loss")
    assert repeats.seen(4, 1, {"loss": "2"}, record(4, 1, loss="1")) == []
    assert repeats.seen(5, 1, {"loss": "2"}, None) == []


def test_losses_of_the_run_before(tmp_path: Path) -> None:
    """Written beside the checkpoints by one run, compared by the next, in a world of that size."""
    kept = LossFile(str(tmp_path), "run-a", ranks=2)
    for step, lineage in ((4, 1), (5, 1), (4, 2)):
        kept.add(step, lineage, {"loss": f"{step}.{lineage}"})
    kept.add(5, 1, {"mean_loss": "7"})
    kept.close(LIMIT_S)
    lines = list(read_lines(loss_path(str(tmp_path), "run-a"), Line))
    assert losses_of(lines, 4, 2) == {4: {"loss": "4.2"}, 5: {"loss": "5.1", "mean_loss": "7"}}
    assert list(losses_of(lines, 5, 2)) == [5]
    assert losses_of(lines, 4, 3) == {}
    repeats = Repeats("loss")
    repeats.expect(losses_of(lines, 4, 2), "before")
    assert repeats.seen(4, 3, {"loss": "4.2"}, None) == []
    (check,) = repeats.seen(5, 3, {"loss": "x"}, None)
    assert (check.source, check.differing[0].recorded) == ("before", "5.1")


def test_a_directory_that_is_not_there_yet_is_waited_for_and_none_is_made(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    kept = LossFile(str(root), "run-a", ranks=1)
    kept.add(0, 1, {"loss": "1"})
    kept.close(LIMIT_S)
    assert not root.exists()
    root.mkdir()
    later = LossFile(str(root), "run-a", ranks=1)
    later.add(1, 1, {"loss": "2"})
    later.close(LIMIT_S)
    assert [line.step for line in read_lines(loss_path(str(root), "run-a"), Line)] == [1]
    assert is_directory("runs/checkpoints")
    assert not is_directory("s3://bucket/checkpoints")
    assert not is_directory("")


def test_a_mismatch_is_kept_said_and_remembered(tmp_path: Path) -> None:
    records = JobRecords(tmp_path, Repeats("loss"))
    for lineage, value in ((1, "a"), (2, "b")):
        records.add_step(
            StepLogged(incarnation="w", step=3, lineage=lineage, values=(("loss", value),))
        )
    assert records.has_mismatch
    assert [line.kind for line in records.lines_after(0)] == ["mismatch"]
    again = JobRecords(tmp_path, Repeats("loss"))
    assert msgspec.structs.asdict(again.checks.all()[0])["step"] == 3
    assert not again.has_mismatch
