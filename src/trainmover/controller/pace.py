"""How much slower training is while a standby rehearses beside it.

Decides what a step takes: the gates between two looks at the job's progress, each long enough to
mean something; and what is compared: the median while a standby rehearses with the median while
nobody does (before it; behind it, where the job has only begun). Seen by the controller, so it
costs members nothing. Changes no decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainmover.controller import lookup
from trainmover.controller.move import Move
from trainmover.controller.state import Pace, State, Worker
from trainmover.units import in_seconds

SPAN_S = 0.2
"""Shortest time between two looks that count."""
KEPT = 48
"""Looks that are kept."""
CALM_MIN, BUSY_MIN = 5, 3
"""Fewest looks a median is taken of."""


def on_gate(move: Move, gate: int) -> None:
    """Some rank has passed `gate`, further than any before."""
    state, pace = move.state, move.state.pace
    seen = Pace(generation=state.generation, gate=gate, at=move.now, calm=pace.calm)
    span_s = in_seconds(move.now - pace.at) if pace.at is not None else 0.0
    if pace.at is None or pace.generation != state.generation or gate <= pace.gate:
        move.state = replace(state, pace=seen)
        return
    if span_s < SPAN_S:
        return
    step_s = span_s / (gate - pace.gate)
    rehearsing = [worker for worker in lookup.standbys(state) if is_rehearsing(worker)]
    for worker in rehearsing:
        move.keep_worker(replace(worker, busy_steps_s=_with(worker.busy_steps_s, step_s)))
    if not rehearsing:
        seen = replace(seen, calm=_with(pace.calm, step_s))
    move.state = replace(move.state, pace=seen)


def _with(kept: tuple[float, ...], step_s: float) -> tuple[float, ...]:
    return (*kept, step_s)[-KEPT:]


def is_rehearsing(worker: Worker) -> bool:
    """Whether a standby has been told to build `main` and is not done yet."""
    return worker.ordered_at is not None and worker.readiness is None and not worker.reason


def calm_step_s(state: State) -> float:
    """Median step while nobody rehearses; 0: not known."""
    calm = state.pace.calm
    return _median(calm) if len(calm) >= CALM_MIN else 0.0


def slowdown(state: State, worker: Worker) -> float:
    """Median step while `worker` rehearsed over that while nobody did; 0: not known."""
    calm_s = worker.calm_step_s or calm_step_s(state)
    if len(worker.busy_steps_s) < BUSY_MIN or calm_s <= 0:
        return 0.0
    return _median(worker.busy_steps_s) / calm_s


def _median(values: Sequence[float]) -> float:
    """Without `statistics`, which imports `random`."""
    ordered = sorted(values)
    return (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
