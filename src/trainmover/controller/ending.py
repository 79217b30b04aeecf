"""The end of a job for one reason: journaled first, then told to every agent, standbys too.

Decides when the controller may go: when every agent's link has closed, or a time has passed.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import checkpoints, lookup, shelf
from trainmover.controller.events import EndJob
from trainmover.controller.move import Move
from trainmover.controller.state import Completing, Ended, Ending, State
from trainmover.protocol import exits
from trainmover.protocol.journal import StoppedRecorded
from trainmover.protocol.messages import OperatorReply, StopAgent

GRACE_S = 2.0


def stop(move: Move, code: int, reason: str) -> None:
    """End the job with `code`; the first reason stays."""
    if isinstance(move.state.phase, Ending | Ended):
        return
    move.append(StoppedRecorded(code=code, reason=reason))
    _answer_open_request(move, reason)
    told = tuple(
        name
        for name in sorted(move.state.machines, key=lookup.natural_order)
        if move.state.machines[name].is_linked
    )
    deadline = move.in_(move.state.config.stop_timeout_s)
    phase = Ending(code=code, reason=reason, told=told, deadline=deadline)
    move.enter(phase)
    move.because(f"stop with {code}: {reason}")
    tell(move, phase)
    check(move)


def _answer_open_request(move: Move, reason: str) -> None:
    requests = [move.state.wish.request] if move.state.wish is not None else []
    if move.state.incident is not None:
        requests.append(move.state.incident.request)
    for request in requests:
        if request:
            text = f"the job has stopped: {reason}"
            move.reply(OperatorReply(request=request, is_accepted=False, is_final=True, text=text))


def tell(move: Move, phase: Ending) -> None:
    """Every agent that is still there."""
    for name in phase.told:
        body = StopAgent(
            term=move.state.term, code=phase.code, reason=phase.reason, grace_s=GRACE_S
        )
        move.send(name, body)


def on_unlinked(move: Move, phase: Ending, machine: str) -> None:
    """One agent has gone."""
    told = tuple(name for name in phase.told if name != machine)
    move.enter(Ending(code=phase.code, reason=phase.reason, told=told, deadline=phase.deadline))
    check(move)


def check(move: Move) -> None:
    """Go when all have gone, or at the deadline."""
    phase = move.state.phase
    if isinstance(phase, Ending) and (not phase.told or move.now >= phase.deadline):
        move.enter(Ended(code=phase.code, reason=phase.reason))
        move.commands.append(EndJob(code=phase.code, reason=phase.reason))


def check_completed(move: Move, phase: Completing) -> None:
    """All workers with a rank have ended by themselves, or had time enough: agents may go."""
    if move.state.failure is not None:
        return  # code behind the loop has raised; its grace time ends the job
    left = [name for name in lookup.member_names(move.state) if name in move.state.workers]
    if left and move.now < phase.deadline:
        return
    if phase.saves_until is not None and _is_saving(move, phase):
        return
    code = exits.STOPPED_BY_OPERATOR if phase.is_stopped else exits.COMPLETED
    if phase.saves_until is not None and _is_saved(move.state):
        code = exits.SUSPENDED
    stop(move, code, exits.REASONS[code])


def _is_saved(state: State) -> bool:
    durable = state.kept.durable
    return durable is not None and durable.version.step == state.step


def _is_saving(move: Move, phase: Completing) -> bool:
    """Whether the last state is on its way to storage; a writer's own deadline bounds it."""
    if _is_saved(move.state):
        return False
    due = checkpoints.due_version(move.state)
    is_due = due is not None and due in shelf.complete_versions(move.state)
    if move.state.kept.writing is not None or is_due:
        until = move.in_(move.state.config.report_timeout_s)
        move.enter(replace(phase, saves_until=until, deadline=max(until, phase.deadline)))
        return True
    return phase.saves_until is not None and move.now < phase.saves_until
