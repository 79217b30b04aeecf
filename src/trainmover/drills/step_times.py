"""When each rank made which step, from the events of a measured job.

Decides what counts as downtime. Events are those of the scripts in examples/benchmarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainmover.drills.baseline import Event
from trainmover.drills.report import joiners
from trainmover.errors import DrillFailed
from trainmover.protocol.journal import IncidentReport


def step_times(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Rank -> step -> when it was committed there."""
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.name == "step":
            found.setdefault(str(event.rank), {})[str(event.step)] = event.time_s
    return found


def median_step_s(events: Sequence[Event], first: int = 2) -> float:
    """Median step of rank 0; the first ones import and compile."""
    times = [event.time_s for event in events if event.name == "step" and event.rank == 0]
    gaps = [b - a for a, b in zip(times[first:], times[first + 1 :], strict=False)]
    if not gaps:
        raise DrillFailed("too few steps to tell how long one takes")
    return statistics.median(gaps)


def stayers_downtime_s(incident: IncidentReport, events: Sequence[Event]) -> float:
    """Gap between the steps around the switchover on the slowest stayer's clock, less one step.

    Raises:
        DrillFailed: No stayer has recorded both steps.
    """
    joined = {role.rank for role in joiners(incident)}
    last, first = incident.resumed_step - 1, incident.resumed_step
    gaps = []
    for rank, steps in step_times(events).items():
        if int(rank) not in joined and str(last) in steps and str(first) in steps:
            before = [
                steps[str(s)] - steps[str(s - 1)]
                for s in range(max(1, last - 40), last + 1)
                if str(s) in steps and str(s - 1) in steps
            ]
            gaps.append(steps[str(first)] - steps[str(last)] - statistics.median(before))
    if not gaps:
        raise DrillFailed(f"no stayer recorded steps {last} and {first}")
    return max(gaps)
