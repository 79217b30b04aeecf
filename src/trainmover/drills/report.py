"""What an incident looked like, for people and for files: phases on one clock, who played what.

Decides how marks of several processes come onto one axis: clocks are never compared. All ranks
pass the first gate of the new generation together, so each process's marks are counted back from
its own mark of that gate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from rich.table import Table

from trainmover.daemons.records import LossRecord
from trainmover.drills.compare import Comparison
from trainmover.protocol.journal import IncidentReport, RolePlayed

FIRST_GATE: Final = "first_gate"

UNPLANNED_ROWS: Final = (
    ("detected", ("detected",)),
    ("run out", ("run_out", "undone")),
    ("reported", ("reported",)),
    ("decided", ("plan_received",)),
    ("connected", ("connected", "swapped")),
    ("state moved", ("received", "settled", "prepared")),
    ("committed", ("committed",)),
    ("first new step", (FIRST_GATE,)),
)
PLANNED_ROWS: Final = (
    ("stopped at the boundary", ("boundary_reached",)),
    ("decided", ("cut_over", "plan_received")),
    ("connected", ("swapped",)),
    ("state moved", ("received", "settled", "prepared")),
    ("committed", ("committed",)),
    ("first new step", (FIRST_GATE,)),
)
PHASES: Final = (PLANNED_ROWS[0][0], *(phase for phase, _ in UNPLANNED_ROWS))
"""All phases, in the order of tables. In the rows: a phase -> marks that show it, best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """One phase and when a stayer and a joiner reached it, in seconds after the first sign."""

    phase: str
    stayer_s: float | None
    joiner_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentSummary:
    """One incident as drills and benchmarks tell it."""

    number: int
    kind: str
    reason: str
    resumed_step: int
    steps_repeated: int
    steps_lost: int
    """Committed steps that had to be done again: 0 while a live replica exists."""
    downtime_s: float | None
    """Last step of the whole job before to first step after, less one median step."""
    rows: tuple[PhaseRow, ...]
    channels_inherited: int
    channels_opened: int
    channels_closed: int


def is_planned(report: IncidentReport) -> bool:
    """Whether somebody asked for it."""
    return report.kind == "planned"


def joiners(report: IncidentReport) -> tuple[RolePlayed, ...]:
    """Roles that another process plays than before."""
    return tuple(role for role in report.roles if role.before != role.incarnation)


def lost_machines(report: IncidentReport) -> tuple[str, ...]:
    """Machines that died: they had a rank, play none now, and nobody asked them to leave."""
    if is_planned(report):
        return ()
    playing = {role.machine for role in report.roles}
    before = dict.fromkeys(machine_of(role.before) for role in report.roles)
    return tuple(machine for machine in before if machine and machine not in playing)


def phase_rows(report: IncidentReport) -> tuple[PhaseRow, ...]:
    """The incident's phases as a stayer and a joiner saw them."""
    joined = {role.rank for role in joiners(report)}
    of_rank = {entry.rank: {m.name: m.at_ns for m in entry.marks} for entry in report.marks}
    complete = {rank: marks for rank, marks in of_rank.items() if FIRST_GATE in marks}
    wanted = PLANNED_ROWS if is_planned(report) else UNPLANNED_ROWS
    first_marks = wanted[0][1]
    stayers = [rank for rank in complete if rank not in joined]
    best = [rank for rank in stayers if any(name in complete[rank] for name in first_marks)]
    stayer = complete[(best or stayers)[0]] if stayers else {}
    joiner = next((marks for rank, marks in complete.items() if rank in joined), {})
    start = next((stayer[name] for name in first_marks if name in stayer), None)
    total_ns = stayer[FIRST_GATE] - start if start is not None else 0
    return tuple(
        PhaseRow(
            phase=phase,
            stayer_s=_seconds(stayer, names, total_ns),
            joiner_s=_seconds(joiner, names, total_ns),
        )
        for phase, names in wanted
    )


def _seconds(marks: Mapping[str, int], names: Sequence[str], total_ns: int) -> float | None:
    for name in names:
        if name in marks:
            return (marks[name] - marks[FIRST_GATE] + total_ns) / 1e9
    return None


def downtime_s(losses: Mapping[int, LossRecord], resumed_step: int) -> float | None:
    """Gap between the steps around `resumed_step` on the controller's clock, less a median step."""
    times = {step: record.at_s for step, record in losses.items()}
    if resumed_step not in times or resumed_step - 1 not in times:
        return None
    gaps = [times[s] - times[s - 1] for s in times if s - 1 in times and s <= resumed_step - 1]
    if not gaps:
        return None
    return times[resumed_step] - times[resumed_step - 1] - statistics.median(gaps[-40:])


def steps_lost(losses: Mapping[int, LossRecord], report: IncidentReport) -> int:
    """Steps that older generations had recorded and that were done again."""
    before = [s for s, record in losses.items() if record.lineage < report.number]
    return max(0, max(before, default=-1) + 1 - report.resumed_step)


def summarise(report: IncidentReport, losses: Mapping[int, LossRecord]) -> IncidentSummary:
    """The figures of one incident."""
    return IncidentSummary(
        number=report.number,
        kind=report.kind,
        reason=report.reason,
        resumed_step=report.resumed_step,
        steps_repeated=report.steps_repeated,
        steps_lost=steps_lost(losses, report),
        downtime_s=downtime_s(losses, report.resumed_step),
        rows=phase_rows(report),
        channels_inherited=sum(role.channels.inherited for role in report.roles),
        channels_opened=sum(role.channels.opened for role in report.roles),
        channels_closed=sum(role.channels.closed for role in report.roles),
    )


def phase_table(summaries: Sequence[IncidentSummary]) -> Table:
    """Phases of all incidents, one column pair per incident."""
    table = Table(title="Seconds after the first sign, each process on its own clock")
    table.add_column("phase")
    for summary in summaries:
        table.add_column(f"{summary.kind}\nstayer", justify="right")
        table.add_column(f"{summary.kind}\njoiner", justify="right")
    phases = list(dict.fromkeys(row.phase for s in summaries for row in s.rows))
    for phase in sorted(phases, key=PHASES.index):
        cells = []
        for summary in summaries:
            row = next((row for row in summary.rows if row.phase == phase), None)
            cells += [_cell(row.stayer_s if row else None), _cell(row.joiner_s if row else None)]
        table.add_row(phase, *cells)
    table.add_section()
    table.add_row("downtime", *_pairs([_cell(s.downtime_s) for s in summaries]))
    table.add_row("steps lost", *_pairs([str(s.steps_lost) for s in summaries]))
    table.add_row("channels kept", *_pairs([str(s.channels_inherited) for s in summaries]))
    table.add_row("channels new", *_pairs([str(s.channels_opened) for s in summaries]))
    return table


def roles_table(reports: Sequence[IncidentReport]) -> Table:
    """Who played which rank in each generation."""
    table = Table(title="Who played which rank")
    table.add_column("rank", justify="right")
    seen = [report for report in reports if report.roles]
    if seen:
        table.add_column(f"g{seen[0].base_generation}")
    for report in seen:
        table.add_column(f"g{report.number}")
    size = max((len(report.roles) for report in seen), default=0)
    for rank in range(size):
        cells = [machine_of(seen[0].roles[rank].before)]
        for report in seen:
            role = report.roles[rank]
            how = f" ({role.source}, {role.adopted})" if role.before != role.incarnation else ""
            cells.append(role.machine + how)
        table.add_row(str(rank), *cells)
    return table


def machine_of(incarnation: str) -> str:
    """Machine in an incarnation's name."""
    return incarnation.split(".", 1)[0]


def as_json(
    summaries: Sequence[IncidentSummary],
    reports: Sequence[IncidentReport],
    comparison: Comparison | None,
    **facts: Any,
) -> bytes:
    """The same as JSON, with the full incident reports."""
    content = {
        **facts,
        "verdict": None if comparison is None else comparison.sentence(),
        "is_identical": comparison is not None and comparison.is_identical,
        "comparison": None if comparison is None else asdict(comparison),
        "incidents": [asdict(summary) for summary in summaries],
        "reports": list(reports),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _pairs(cells: Sequence[str]) -> list[str]:
    return [cell for text in cells for cell in (text, "")]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
