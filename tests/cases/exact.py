"""EXACT: the traces of an interrupted run equal those of an undisturbed one, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COUNTED = ("generation", "run")
"""Of which life a line is; the only thing that may differ."""


def trace(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    """The last line of each step: what was repeated after a loss counts, not what was lost."""
    found: dict[int, dict[str, Any]] = {}
    for text in (folder / f"rank{rank}.jsonl").read_text().splitlines():
        line = json.loads(text)
        found[line["step"]] = {name: v for name, v in line.items() if name not in COUNTED}
    return found


def assert_exact(
    found: Path, expected: Path, *, ranks: int, steps: int, of: int | None = None
) -> None:
    """Byte for byte; no step is missing and none is there too many.

    Args:
        found: Trace of the run in question.
        expected: Trace of the undisturbed one.
        ranks: How many ranks both have.
        steps: How many steps the run in question had to make.
        of: How many the undisturbed one made; None: as many.
    """
    for rank in range(ranks):
        ours, theirs = trace(found, rank), trace(expected, rank)
        assert sorted(ours) == list(range(steps)), (rank, sorted(ours))
        assert sorted(theirs) == list(range(of or steps)), (rank, sorted(theirs))
        for step in range(steps):
            differing = [k for k in theirs[step] if ours[step].get(k) != theirs[step][k]]
            assert not differing, (
                f"rank {rank}, step {step}: {', '.join(differing)} differ: "
                f"{[ours[step].get(k) for k in differing]} instead of "
                f"{[theirs[step][k] for k in differing]}"
            )


def samples(folder: Path, ranks: int) -> list[int]:
    """Every sample id that counts, in the order of steps and ranks: the ledger of an epoch."""
    found: list[int] = []
    traces = [trace(folder, rank) for rank in range(ranks)]
    for step in sorted(traces[0]):
        for each in traces:
            found += each[step]["ids"]
    return found


def ledger(folder: Path) -> dict[int, list[int]]:
    """Sample ids by step, of the ranks of the last run that made the step, whatever its size."""
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("rank*.jsonl")):
        found: dict[tuple[int, str], dict[str, Any]] = {}
        for text in path.read_text().splitlines():
            line = json.loads(text)
            found[line["step"], line["run"]] = line
        lines += found.values()
    # Rank 0 is in every run: its last line of a step tells which run counts.
    counting: dict[int, str] = {}
    for text in (folder / "rank0.jsonl").read_text().splitlines():
        line = json.loads(text)
        counting[line["step"]] = line["run"]
    steps: dict[int, list[int]] = {step: [] for step in sorted(counting)}
    for line in lines:
        if counting.get(line["step"]) == line["run"]:
            steps[line["step"]] += line["ids"]
    return steps
