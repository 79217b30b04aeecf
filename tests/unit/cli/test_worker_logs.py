"""Merged logs: prefix by rank and generation, whole lines only, files found later."""

from __future__ import annotations

from pathlib import Path

from trainmover.cli.screen import progress_text, readable
from trainmover.cli.worker_logs import WorkerLogs, log_names


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(text)


def test_lines_come_once_with_their_prefix(tmp_path: Path) -> None:
    logs = WorkerLogs(tmp_path)
    write(tmp_path / "g1" / "rank2.log", "one\ntwo\nthr")
    assert list(logs.news()) == [("[rank 2 g1]", "one"), ("[rank 2 g1]", "two")]
    write(tmp_path / "g1" / "rank2.log", "ee\n")
    write(tmp_path / "worker-m4.0.1.log", "early\n")
    assert list(logs.news()) == [("[m4.0.1]", "early"), ("[rank 2 g1]", "three")]
    assert list(logs.news()) == []


def test_ranks_and_generations_are_ordered_as_numbers(tmp_path: Path) -> None:
    for name in ("g10/rank0.log", "g2/rank10.log", "g2/rank9.log"):
        write(tmp_path / name, "x\n")
    assert [(n.generation, n.rank) for n in log_names(tmp_path)] == [(2, 9), (2, 10), (10, 0)]


def test_the_progress_line_says_generation_state_step_and_loss() -> None:
    status = {"generation": 2, "phase": "training", "step": 3, "standbys": [{"is_ready": True}]}
    last = {"step": 7, "values": {"loss": (0.5).hex()}}
    assert progress_text(status, last) == "g2  training  step 7  loss 0.5  standbys ready 1/1"


def test_values_that_are_no_floats_are_shown_as_they_are() -> None:
    assert (readable((0.25).hex()), readable("warm")) == ("0.25", "warm")
