"""The picture of a disturbed run: one lane per machine, and each switchover under a lens.

Decides the drawing only. Needs matplotlib (the `report` extra); times come from the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.daemons.records import LossRecord
from trainmover.drills.report import IncidentSummary, machine_of
from trainmover.errors import ConfigError
from trainmover.protocol.journal import IncidentReport

ROLE_COLOURS: Final = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#9d755d")
STANDBY_COLOUR: Final = "#d9d9d9"
FAULT_COLOUR: Final = "#d62728"
PHASE_COLOURS: Final = (
    "#9ecae9",
    "#4c78a8",
    "#88d27a",
    "#54a24b",
    "#ffbf79",
    "#f58518",
    "#d6a5c9",
    "#b279a2",
)


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

    shown = [summary for summary in summaries if _has_times(summary)]
    figure = pyplot.figure(figsize=(12, 3.2 + 0.35 * len(machines) + 1.6 * bool(shown)))
    grid = figure.add_gridspec(
        2 if shown else 1, max(1, len(shown)), height_ratios=[1.3, 1] if shown else [1]
    )
    lanes = figure.add_subplot(grid[0, :])
    found = reigns(losses, reports, len(machines))
    _draw_lanes(lanes, found, machines)
    _draw_switchovers(lanes, found, reports)
    _draw_loss(lanes, losses)
    for column, summary in enumerate(shown):
        _draw_lens(figure.add_subplot(grid[1, column]), summary)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_lanes(axes: Any, found: Sequence[Reign], machines: Sequence[str]) -> None:
    lost: set[str] = set()
    labelled: set[tuple[str, int]] = set()
    for index, reign in enumerate(found):
        end_s = found[index + 1].start_s if index + 1 < len(found) else reign.end_s
        for lane, machine in enumerate(machines):
            width = end_s - reign.start_s
            if machine in reign.machines:
                rank = reign.machines.index(machine)
                colour = ROLE_COLOURS[rank % len(ROLE_COLOURS)]
                axes.barh(lane, width, left=reign.start_s, height=0.7, color=colour)
                if (machine, rank) not in labelled:
                    labelled.add((machine, rank))
                    middle = reign.start_s + 0.01 * found[-1].end_s
                    axes.text(middle, lane, f"rank {rank}", va="center", color="white", size=8)
            elif machine not in lost:
                axes.barh(
                    lane, width, left=reign.start_s, height=0.7, color=STANDBY_COLOUR, zorder=0
                )
                if (machine, -1) not in labelled:
                    labelled.add((machine, -1))
                    middle = reign.start_s + 0.01 * found[-1].end_s
                    axes.text(middle, lane, "standby", va="center", color="#555555", size=8)
    axes.set_yticks(range(len(machines)), machines)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first step")
    axes.set_title("Who trained what, when: one lane per machine, one colour per rank", size=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_switchovers(axes: Any, found: Sequence[Reign], reports: Sequence[IncidentReport]) -> None:
    by_number = {report.number: report for report in reports}
    for reign in found[1:]:
        report = by_number.get(reign.generation)
        is_fault = report is not None and report.kind != "planned"
        colour = FAULT_COLOUR if is_fault else "black"
        axes.axvline(reign.start_s, color=colour, linewidth=1, linestyle="--")
        label = f"g{reign.generation}: {report.kind if report else 'formed'}"
        axes.text(reign.start_s, -0.55, label, color=colour, size=8, ha="center", va="bottom")


def _draw_loss(axes: Any, losses: Mapping[int, LossRecord]) -> None:
    zero = min((record.at_s for record in losses.values()), default=0.0)
    points = [
        (record.at_s - zero, float.fromhex(record.values["loss"]))
        for record in losses.values()
        if "loss" in record.values
    ]
    if not points:
        return
    twin = axes.twinx()
    twin.plot([x for x, _ in points], [y for _, y in points], color="#333333", linewidth=0.9)
    twin.set_ylabel("loss")
    for side in ("top", "left"):
        twin.spines[side].set_visible(False)


def _draw_lens(axes: Any, summary: IncidentSummary) -> None:
    lanes = (("stayer", "stayer_s"), ("joiner", "joiner_s"))
    for lane, (_, field) in enumerate(lanes):
        before = None
        for index, row in enumerate(summary.rows):
            at_s = getattr(row, field)
            if at_s is None:
                continue
            if before is not None and at_s >= before:
                colour = PHASE_COLOURS[index % len(PHASE_COLOURS)]
                label = row.phase if lane == 0 or summary.rows[index].stayer_s is None else None
                axes.barh(
                    lane,
                    (at_s - before) * 1000,
                    left=before * 1000,
                    height=0.6,
                    color=colour,
                    label=label,
                )
            before = at_s
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds after the first sign")
    downtime = "" if summary.downtime_s is None else f", downtime {summary.downtime_s:.2f} s"
    axes.set_title(f"g{summary.number}: {summary.kind}{downtime}", size=10)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.35), ncol=4, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _has_times(summary: IncidentSummary) -> bool:
    return sum(row.stayer_s is not None for row in summary.rows) > 1
