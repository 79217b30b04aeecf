"""The picture of a disturbed run: one lane per machine, and each switchover under a lens.

Decides the drawing only. Needs matplotlib (the `report` extra); times come from the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.daemons.records import LossRecord
from trainmover.drills.report import PHASES, IncidentSummary, lost_machines, machine_of
from trainmover.errors import ConfigError
from trainmover.protocol.journal import IncidentReport

ROLE_COLOURS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d")
STANDBY_COLOUR: Final = "#dddddd"
FAULT_COLOUR: Final = "#d62728"
PHASE_COLOURS: Final = dict(
    zip(
        PHASES,
        (
            *("#bbbbbb", "#d62728", "#ff9896", "#ffbb78", "#f7b6d2"),
            *("#9edae5", "#1f77b4", "#2ca02c", "#98df8a"),
        ),
        strict=True,
    )
)
"""A colour belongs to the stretch that ends with the phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reign:
    """One generation: when it trained, and who played which rank."""

    generation: int
    start_s: float
    end_s: float
    machines: tuple[str, ...]


def reigns(
    losses: Mapping[int, LossRecord], reports: Sequence[IncidentReport], machines: int
) -> list[Reign]:
    """Generations in order, in seconds after the first recorded step."""
    if not losses:
        return []
    times: dict[int, list[float]] = {}
    for record in losses.values():
        times.setdefault(record.lineage, []).append(record.at_s)
    zero = min(record.at_s for record in losses.values())
    players = {report.number: tuple(r.machine for r in report.roles) for report in reports}
    first = next((r for r in reports if r.roles), None)
    start = (
        tuple(machine_of(role.before) for role in first.roles)
        if first is not None
        else tuple(f"m{index}" for index in range(machines))
    )
    return [
        Reign(
            generation=generation,
            start_s=min(found) - zero,
            end_s=max(found) - zero,
            machines=players.get(generation) or start,
        )
        for generation, found in sorted(times.items())
    ]


def draw(
    path: Path,
    losses: Mapping[int, LossRecord],
    reports: Sequence[IncidentReport],
    summaries: Sequence[IncidentSummary],
    machines: Sequence[str],
) -> None:
    """Write the picture to `path`. Raises ConfigError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "the timeline picture needs matplotlib: pip install 'trainmover[report]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    shown = [summary for summary in summaries if _has_times(summary)]
    found = reigns(losses, reports, len(machines))
    heights = [0.45 * len(machines), 1.0, *([1.3] if shown else [])]
    figure = pyplot.figure(figsize=(12, 1.8 + 1.25 * sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), max(1, len(shown)), height_ratios=heights)
    lanes = figure.add_subplot(grid[0, :])
    _draw_lanes(lanes, found, machines, _losses_of_machines(found, reports))
    _draw_switchovers(lanes, found, reports)
    below = figure.add_subplot(grid[1, :], sharex=lanes)
    _draw_loss(below, losses, found)
    for column, summary in enumerate(shown):
        _draw_lens(figure.add_subplot(grid[2, column]), summary)
    if shown:
        used = [phase for phase in PHASES if any(_has_phase(s, phase) for s in shown)]
        handles = [Patch(color=PHASE_COLOURS[phase]) for phase in used]
        figure.legend(
            handles,
            [f"until {phase}" for phase in used],
            loc="outside lower center",
            ncol=len(used),
            fontsize=8,
            frameon=False,
        )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _losses_of_machines(
    found: Sequence[Reign], reports: Sequence[IncidentReport]
) -> dict[str, float]:
    """When each machine that died was lost."""
    starts = {reign.generation: reign.start_s for reign in found}
    return {
        machine: starts[report.number]
        for report in reports
        if report.number in starts
        for machine in lost_machines(report)
    }


def _draw_lanes(
    axes: Any, found: Sequence[Reign], machines: Sequence[str], lost_s: Mapping[str, float]
) -> None:
    margin = 0.008 * found[-1].end_s if found else 0.0
    shown: dict[str, str] = {}
    for index, reign in enumerate(found):
        end_s = found[index + 1].start_s if index + 1 < len(found) else reign.end_s
        for lane, machine in enumerate(machines):
            label, colour, ink = "standby", STANDBY_COLOUR, "#555555"
            if machine in reign.machines:
                rank = reign.machines.index(machine)
                label, colour = f"rank {rank}", ROLE_COLOURS[rank % len(ROLE_COLOURS)]
                ink = "white"
            elif reign.start_s >= lost_s.get(machine, float("inf")):
                label, colour, ink = "lost", "white", FAULT_COLOUR
            axes.barh(lane, end_s - reign.start_s, left=reign.start_s, height=0.72, color=colour)
            if shown.get(machine) != label:
                shown[machine] = label
                place = (reign.start_s + margin, lane)
                axes.text(*place, label, va="center", color=ink, size=8, weight="bold")
    axes.set_yticks(range(len(machines)), machines)
    axes.invert_yaxis()
    axes.tick_params(labelbottom=False)
    axes.set_title("Who trained what, when: a lane per machine, a colour per rank", size=11, pad=22)
    _bare(axes, "top", "right", "left")


def _draw_switchovers(axes: Any, found: Sequence[Reign], reports: Sequence[IncidentReport]) -> None:
    by_number = {report.number: report for report in reports}
    for reign in found[1:]:
        report = by_number.get(reign.generation)
        is_fault = report is not None and report.kind != "planned"
        colour = FAULT_COLOUR if is_fault else "black"
        axes.axvline(reign.start_s, color=colour, linewidth=1, linestyle="--")
        kind = report.kind if report is not None else "formed"
        dead = ", ".join(lost_machines(report)) if report is not None else ""
        label = f"g{reign.generation}: {kind}" + (f" for {dead}" if dead else "")
        axes.text(reign.start_s, -0.5, label, color=colour, size=8, ha="center", va="bottom")


def _draw_loss(axes: Any, losses: Mapping[int, LossRecord], found: Sequence[Reign]) -> None:
    zero = min((record.at_s for record in losses.values()), default=0.0)
    points = [
        (record.at_s - zero, float.fromhex(record.values["loss"]))
        for record in losses.values()
        if "loss" in record.values
    ]
    axes.plot([x for x, _ in points], [y for _, y in points], color="#333333", linewidth=0.9)
    for reign in found[1:]:
        axes.axvline(reign.start_s, color="#999999", linewidth=0.8, linestyle="--")
    axes.set_ylabel("loss")
    axes.set_xlabel("seconds since the first step")
    _bare(axes, "top", "right")


def _draw_lens(axes: Any, summary: IncidentSummary) -> None:
    lanes = (("stayer", "stayer_s"), ("joiner", "joiner_s"))
    for lane, (_, name) in enumerate(lanes):
        before_s = 0.0
        for row in summary.rows:
            at_s = getattr(row, name)
            if at_s is None or at_s < before_s:
                continue  # done ahead, while training went on
            width_ms = (at_s - before_s) * 1000
            axes.barh(
                lane, width_ms, left=before_s * 1000, height=0.6, color=PHASE_COLOURS[row.phase]
            )
            before_s = at_s
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds after the first sign")
    downtime = "" if summary.downtime_s is None else f", downtime {summary.downtime_s:.2f} s"
    axes.set_title(f"g{summary.number}: {summary.kind}{downtime}", size=10)
    _bare(axes, "top", "right", "left")


def _bare(axes: Any, *sides: str) -> None:
    for side in sides:
        axes.spines[side].set_visible(False)


def _has_times(summary: IncidentSummary) -> bool:
    return sum(row.stayer_s is not None for row in summary.rows) > 1


def _has_phase(summary: IncidentSummary, phase: str) -> bool:
    rows = [row for row in summary.rows if row.phase == phase]
    return any((row.stayer_s or 0.0) > 0 or (row.joiner_s or 0.0) > 0 for row in rows)
