"""Marks of several clocks come onto one axis, and lost steps are counted."""

from __future__ import annotations

from trainmover.daemons.records import LossRecord
from trainmover.drills.report import downtime_s, phase_rows, steps_lost
from trainmover.protocol.journal import IncidentReport, RankMarks, RolePlayed
from trainmover.protocol.messages import Mark

MS = 1_000_000


def marks(rank: int, offset_ms: int, **at_ms: int) -> RankMarks:
    """Marks on a clock of its own."""
    found = tuple(Mark(name=n, at_ns=(offset_ms + at) * MS) for n, at in at_ms.items())
    return RankMarks(rank=rank, marks=found)


def role(rank: int, before: str, now: str) -> RolePlayed:
    machine = now.split(".", maxsplit=1)[0]
    return RolePlayed(rank=rank, machine=machine, incarnation=now, before=before)


REPORT = IncidentReport(
    number=2,
    kind="standby",
    base_generation=1,
    reason="m1 is gone",
    roles=(role(0, "m0.0.1", "m0.0.1"), role(1, "m1.0.1", "m2.0.1")),
    marks=(
        marks(0, 5_000, detected=0, run_out=20, plan_received=50, connected=80, first_gate=200),
        marks(1, 999_000, plan_received=10, received=70, first_gate=150),
    ),
    resumed_step=6,
)


def record(step: int, lineage: int, at_s: float) -> LossRecord:
    return LossRecord(step=step, lineage=lineage, values={}, at_s=at_s)


def test_clocks_are_aligned_at_the_first_new_gate() -> None:
    rows = {row.phase: row for row in phase_rows(REPORT)}
    assert rows["detected"].stayer_s == 0.0
    assert rows["run out"].stayer_s == 0.02
    assert rows["first new step"].stayer_s == rows["first new step"].joiner_s == 0.2
    # 80 ms before the joiner's own gate, which is 200 ms after the stayer's detection.
    assert rows["state moved"].joiner_s == 0.12


def test_downtime_is_the_gap_less_a_median_step() -> None:
    losses = {s: record(s, 1, s * 0.1) for s in range(6)}
    losses |= {s: record(s, 2, 1.0 + (s - 6) * 0.1) for s in range(6, 9)}
    found = downtime_s(losses, 6)
    assert found is not None
    assert abs(found - 0.4) < 1e-9
    assert steps_lost(losses, REPORT) == 0


def test_steps_done_again_are_lost_steps() -> None:
    losses = {s: record(s, 1, s * 0.1) for s in range(8)}
    assert steps_lost(losses, REPORT) == 2


def test_a_report_without_marks_has_empty_rows() -> None:
    bare = IncidentReport(number=2, kind="planned", base_generation=1, reason="")
    assert all(row.stayer_s is None and row.joiner_s is None for row in phase_rows(bare))
