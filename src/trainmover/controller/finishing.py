"""The end of training: the finish gate, COMPLETE, and stops the operator asks for.

Decides when all ranks have done all steps (C6: one passed finish gate proves it for everyone).
Upholds protocol 17: processes and states are kept until COMPLETE is journaled.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.controller import ending, fitting, lookup, notices, shelf, switchover
from trainmover.controller.move import Move
from trainmover.controller.state import (
    Completing,
    Ended,
    Ending,
    Finishing,
    Flagged,
    Forming,
    Freezing,
    Gathering,
    Preparing,
    Switching,
    Training,
)
from trainmover.protocol import exits
from trainmover.protocol.journal import AbortRecorded, CompleteRecorded, StopRequested
from trainmover.protocol.messages import (
    Complete,
    FinishPassed,
    OperatorReply,
    StopAtBoundary,
    StopRequest,
    TakeSnapshot,
)


def on_finish_passed(move: Move, body: FinishPassed) -> None:
    """A rank has passed the finish gate of the committed generation."""
    if body.generation != move.state.generation:
        return
    phase = move.state.phase
    if isinstance(phase, Preparing | Flagged | Switching) and phase.plan.kind == "planned":
        switchover.give_up(move, "the job has finished")
    match move.state.phase:
        case Training():
            deadline = move.in_(move.state.config.complete_timeout_s)
            phase = Finishing(
                passed=(), step=body.step, is_stopped=body.is_stopped, deadline=deadline
            )
            _pass(move, phase, body)
        case Finishing() as finishing:
            _pass(move, finishing, body)
        case Freezing(number=number) | Gathering(number=number):
            move.append(AbortRecorded(number=number, reason="the job has finished"))
            complete(move, body.step, is_stopped=body.is_stopped)
        case Completing():
            move.tell(body.incarnation, Complete(term=move.state.term))
        case _:
            pass


def _pass(move: Move, phase: Finishing, body: FinishPassed) -> None:
    passed = tuple(dict.fromkeys((*phase.passed, body.incarnation)))
    move.enter(replace(phase, passed=passed))
    if all(name in passed for name in lookup.member_names(move.state)):
        complete(move, body.step, is_stopped=phase.is_stopped)


def complete(move: Move, step: int, *, is_stopped: bool) -> None:
    """Every rank has done all steps: journal it, then let the processes go."""
    move.append(CompleteRecorded(generation=move.state.generation, step=step))
    move.state = replace(move.state, step=step)
    phase = completing(move, is_stopped=is_stopped)
    move.enter(phase)
    for name in lookup.member_names(move.state):
        move.tell(name, Complete(term=move.state.term))
    move.because(f"complete at step {step}")
    ending.check_completed(move, phase)


def completing(move: Move, *, is_stopped: bool) -> Completing:
    """The phase behind COMPLETE; with checkpoints, the state that the job ends with becomes one."""
    config = move.state.config
    does_save = move.state.kept.keeping.checkpoint.is_on
    return Completing(
        is_stopped=is_stopped,
        deadline=move.in_(config.complete_timeout_s),
        saves_until=move.in_(config.report_timeout_s) if does_save else None,
    )


def on_stop_request(move: Move, request: StopRequest) -> None:
    """The operator wants an end: at the next boundary, or now."""
    phase = move.state.phase
    is_over = isinstance(phase, Completing | Ending | Ended)
    text = "the job ends already" if is_over else f"stopping ({request.mode})"
    if not is_over and request.mode == "boundary" and request.grace_s > 0:
        text = f"{text}; {notices.limit(move, request.grace_s)}"
    reply = OperatorReply(request=request.request, is_accepted=True, is_final=True, text=text)
    move.reply(reply)
    if is_over:
        return
    if request.mode == "now" or isinstance(phase, Forming) or _is_form(phase):
        code = exits.STOPPED_BY_OPERATOR
        ending.stop(move, code, exits.REASONS[code])
        return
    want_stop(move)


def suspend_if_all_leave(move: Move) -> None:
    """Every machine with ranks is about to go: a checkpoint is all that can outlive that."""
    membership = move.state.membership
    if membership is None or not move.state.kept.keeping.checkpoint.is_on:
        return
    known = [move.state.machines.get(name) for name in membership.machines()]
    if all(machine is not None and machine.is_leaving for machine in known):
        notices.hurry(move)
        move.because("every machine is about to go: the job is suspended")
        want_stop(move)


def want_stop(move: Move) -> None:
    """The job stops at the next boundary."""
    if not move.state.is_stop_wanted:
        move.append(StopRequested())
        move.state = replace(move.state, is_stop_wanted=True)
        ask_to_stop(move)


def _is_form(phase: object) -> bool:
    return isinstance(phase, Switching) and phase.plan.kind == "form"


def ask_to_stop(move: Move) -> None:
    """Every member carries the stop request in its next gate, and the wish for a snapshot there."""
    if not move.state.is_stop_wanted or not isinstance(move.state.phase, Training):
        return
    snapshot = TakeSnapshot(term=move.state.term, level=shelf.EMERGENCY)
    for name in lookup.member_names(move.state):
        if move.state.kept.keeping.checkpoint.is_on and fitting.does_save_fit(move.state, move.now):
            move.tell(name, snapshot)
        move.tell(name, StopAtBoundary(term=move.state.term))
