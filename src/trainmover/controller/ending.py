"""The end of a job for one reason: journaled first, then told to every agent, standbys too.

Decides when the controller may go: when every agent's link has closed, or a time has passed.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import checkpoints, fitting, lookup, shelf
from trainmover.controller.events import EndJob
from trainmover.controller.move import Move
from trainmover.controller.state import Completing, Ended, Ending, State
from trainmover.protocol import exits
from trainmover.protocol.journal import StoppedRecorded
from trainmover.protocol.messages import OperatorReply, StopAgent, StopNow

GRACE_S = 2.0
LEAST_SAVE_S = 20.0
"""Least time for a last checkpoint where earlier ones have not shown how long one takes."""
RESUMABLE = frozenset({exits.SCRIPT_FAILED, exits.TOO_MANY_INCIDENTS, exits.NO_MACHINE})
"""Ends after which somebody will want to go on from what was reached."""


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
    if code in RESUMABLE and _keep_aside(move, phase):
        return
    tell(move, phase)
    check(move)


def _keep_aside(move: Move, phase: Ending) -> bool:
    """Agents stay for a while if their memory has a good version newer than any checkpoint.

    Out of memory, a mistake in the script, no machine left: what was trained until the last
    snapshot need not be lost with the agents' memory.
    """
    kept = move.state.kept
    version = shelf.newest_sound(move.state)
    is_there = kept.durable is not None and version is not None and kept.durable.version >= version
    if not kept.keeping.checkpoint.is_on or version is None or is_there:
        return False
    usual_s = max(LEAST_SAVE_S, 3 * kept.save_s)
    left_s = fitting.time_left_s(move.state, move.now)
    until = move.in_(usual_s if left_s is None else min(usual_s, left_s))
    shelf.keep(move, replace(kept, due=version, given_up=None))
    move.enter(replace(phase, saves_until=until, deadline=until))
    for name in lookup.member_names(move.state):
        move.tell(name, StopNow(term=move.state.term, code=phase.code, reason=phase.reason))
    move.because(f"the snapshot of step {version.step} is made durable first")
    checkpoints.advance(move)
    return True


def continue_saving(move: Move) -> bool:
    """Whether agents still make the last good version durable; asked whenever something moved."""
    phase = move.state.phase
    if not isinstance(phase, Ending) or phase.saves_until is None:
        return False
    checkpoints.advance(move)
    kept = move.state.kept
    is_busy = kept.writing is not None or kept.due_now is not None
    if is_busy and move.now < phase.saves_until:
        return True
    durable, reason = kept.durable, phase.reason
    if durable is not None:
        head, line, rest = reason.partition("\n")
        reason = f"{head} [checkpoint of step {durable.version.step}: {durable.name}]{line}{rest}"
    deadline = move.in_(move.state.config.stop_timeout_s)
    phase = replace(phase, saves_until=None, deadline=deadline, reason=reason)
    move.enter(phase)
    tell(move, phase)
    return False


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
    move.enter(replace(phase, told=told))
    check(move)


def check(move: Move) -> None:
    """Go when all have gone, or at the deadline."""
    if continue_saving(move):
        return
    phase = move.state.phase
    if isinstance(phase, Ending) and (not phase.told or move.now >= phase.deadline):
        move.enter(Ended(code=phase.code, reason=phase.reason))
        move.commands.append(EndJob(code=phase.code, reason=phase.reason))


def check_completed(move: Move, phase: Completing) -> None:
    """All workers with a rank have ended by themselves, or had time enough: agents may go."""
    if move.state.failure is not None:
        return  # code behind the loop has raised; its grace time ends the job
    left = [name for name in lookup.member_names(move.state) if _is_awaited(move, name)]
    if left and move.now < phase.deadline:
        return
    if phase.saves_until is not None:
        _want_last(move)
        if _is_saving(move, phase):
            return
    code, reason = how_stopped(move.state) if phase.is_stopped else _how_completed(move.state)
    stop(move, code, reason)


def _want_last(move: Move) -> None:
    """What is due is the state that the job ends with, if what was due before can't be had."""
    kept, state = move.state.kept, move.state
    whole = shelf.complete_versions(state)
    last = next((version for version in whole if version.step == state.step), None)
    if last is None or kept.writing is not None or kept.due_now in whole:
        return
    if last not in (kept.suspect, kept.given_up) and not _is_saved(state):
        shelf.keep(move, replace(kept, due=last))


def _is_awaited(move: Move, name: str) -> bool:
    worker = move.state.workers.get(name)
    if worker is None:
        return False
    machine = move.state.machines.get(worker.machine)
    return machine is None or not machine.is_lost


def _how_completed(state: State) -> tuple[int, str]:
    """Exit code and reason of a job that has done all its steps."""
    kept = state.kept
    if not kept.keeping.checkpoint.is_on or state.step == 0 or _is_saved(state):
        return exits.COMPLETED, exits.REASONS[exits.COMPLETED]
    if kept.suspect is not None and kept.suspect.step == state.step:
        text = "the checkpoint of its last state is marked suspect, its loss was in doubt"
        return exits.COMPLETED, f"{exits.REASONS[exits.COMPLETED]}; {text}"
    newest = "there is none" if kept.durable is None else f"the newest is {kept.durable.name}"
    missed = f"; last failure: {kept.failure}" if kept.failure else ""
    where = "is in no checkpoint ("
    if kept.on_disk is not None and _is_on_disks(state):
        where = f"is on machines' own disks only ({kept.on_disk.name}; in the storage "
    text = f"completed, but step {state.step}, its last, {where}{newest}{missed})"
    return exits.NOT_SAVED, text


def how_stopped(state: State) -> tuple[int, str]:
    """Exit code and reason of a job that was asked to stop: whether it can go on, and from where.

    In a hurry an earlier checkpoint is enough to say so; whoever has time is told that the last
    state could not be saved.
    """
    durable = state.kept.durable
    if state.stop_by is None and _is_on_disks(state) and not _is_saved(state):
        text = "suspended: its last state is on machines' own disks only, not in the storage"
        missed = f" ({state.kept.failure})" if state.kept.failure else ""
        return exits.SUSPENDED, f"{text}{missed}"
    if state.kept.keeping.checkpoint.is_on and durable is not None:
        if _is_saved(state):
            return exits.SUSPENDED, exits.REASONS[exits.SUSPENDED]
        if state.stop_by is not None:
            lost = max(0, max(state.step, lookup.known_step(state)) - durable.version.step)
            again = f"{lost} steps are done again" if lost else "no step is lost"
            text = f"suspended: it goes on from the checkpoint of step {durable.version.step}"
            return exits.SUSPENDED, f"{text}, {again}"
    return exits.STOPPED_BY_OPERATOR, exits.REASONS[exits.STOPPED_BY_OPERATOR]


def _is_saved(state: State) -> bool:
    durable = state.kept.durable
    return durable is not None and durable.version.step == state.step


def _is_on_disks(state: State) -> bool:
    """Whether a start of the same machines finds the last state on their own disks."""
    on_disk = state.kept.on_disk
    return on_disk is not None and on_disk.version.step == state.step


def _is_saving(move: Move, phase: Completing) -> bool:
    """Whether the last state is on its way to storage; a writer's own deadline bounds it."""
    if _is_saved(move.state):
        return False
    due = move.state.kept.due_now
    is_due = due is not None and due in shelf.complete_versions(move.state)
    does_fit = fitting.does_save_fit(move.state, move.now)
    if move.state.kept.writing is not None or (is_due and does_fit):
        until = move.in_(move.state.config.report_timeout_s)
        move.enter(replace(phase, saves_until=until, deadline=max(until, phase.deadline)))
        return True
    return does_fit and phase.saves_until is not None and move.now < phase.saves_until
