"""Promise P2 on the data plane: an interrupted and repeated step leaves no trace."""

from __future__ import annotations

import pytest

from . import interruption_cases as cases
from . import parallel_cases
from .fleet import run_ranks


@pytest.mark.parametrize("machines", [True, False], ids=["sockets", "shared_memory"])
def test_outstanding_works_end_with_valid_values(machines: bool) -> None:
    results = run_ranks(2, cases.tensors, machines=machines)
    assert results == [[2.0] * 5] * 2


@pytest.mark.timeout(240)
@pytest.mark.parametrize("late", [False, True], ids=["entered", "outstanding"])
@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_interruption_at_every_collective(kind: str, size: int, late: bool) -> None:
    reference = run_ranks(size, cases.undisturbed, kind)
    calls = reference[0][1]
    assert all(calls), calls
    points = [(step, at, late) for step in range(cases.STEPS) for at in range(1, calls[step] + 1)]
    if size > 2:
        points = points[:: 3 if late else 2]  # all of them: tests/process/steps
    results = run_ranks(size, cases.interrupted, kind, points, timeout_s=170.0)
    for rank in range(size):
        wrong = [p for p, d in zip(points, results[rank], strict=True) if d != reference[rank][0]]
        assert not wrong, f"rank {rank}: {len(wrong)} of {len(points)} differ, first {wrong[0]}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stride"), [("tensor", 1), ("pipeline", 3), ("compiled", 1)])
def test_interruption_of_other_parallelism(kind: str, stride: int) -> None:
    for calls, count, wrong in run_ranks(2, parallel_cases.every_point, kind, stride):
        assert count >= 3, calls
        assert not wrong, f"{len(wrong)} of {count} differ, first {wrong[0]}"
