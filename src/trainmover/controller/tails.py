"""Ranks that are behind a gate when the job is frozen: how long they are waited for.

Decides that a rank which keeps saying so (it saves, it evaluates) is not excluded for being silent,
within a limit of its own. What it reports in the end is judged like every other report.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import lookup
from trainmover.controller.move import Move
from trainmover.controller.state import Freezing, Worker
from trainmover.protocol.messages import Freeze, InTail


def on_in_tail(move: Move, worker: Worker, body: InTail) -> None:
    """An answer to a freeze: the report comes at the next boundary."""
    phase = move.state.phase
    if isinstance(phase, Freezing) and phase.number == body.number and worker.role == "member":
        move.enter(replace(phase, tails={**phase.tails, worker.incarnation: move.now}))


def prolong(move: Move, phase: Freezing, awaited: list[str]) -> bool:
    """The deadline for reports has passed: whether some of `awaited` get more time."""
    state, config = move.state, move.state.config
    incident = state.incident
    started = incident.started_at if incident is not None else move.now
    fresh = [
        name
        for name in awaited
        if name in phase.tails and not move.has_waited(phase.tails[name], config.report_timeout_s)
    ]
    if not fresh or move.has_waited(started, config.tail_timeout_s):
        return False
    move.enter(replace(phase, deadline=move.in_(config.report_timeout_s)))
    # Those who have reported hear it as well: a frozen worker that hears nothing gives up.
    for name in lookup.member_names(state):
        if name in phase.reports:
            move.tell(name, Freeze(term=state.term, number=phase.number))
    move.because(f"waits for {', '.join(fresh)}, behind a gate")
    return True
