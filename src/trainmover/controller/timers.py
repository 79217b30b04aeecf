"""Everything that happens because time has passed, and what is sent again until it is answered.

Decides nothing that is not due: each handler looks at its own deadline. The resend interval is the
controller's pulse; nothing needs a timer of its own that is longer than that (I12).
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from trainmover.controller import (
    checkpoints,
    classes,
    ending,
    finishing,
    fitting,
    forming,
    incidents,
    lookup,
    losses,
    notices,
    plans,
    pool,
    recovery,
    shelf,
    switchover,
)
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
    State,
    Switching,
    Training,
    Worker,
)
from trainmover.protocol.messages import (
    Commit,
    Complete,
    Freeze,
    PlanIssued,
    Prepare,
    RaiseFlag,
    Release,
    ToWorkerBody,
)
from trainmover.units import Instant, after, earliest, seconds


def next_deadline(state: State) -> Instant | None:
    """When the controller has to move even if nothing happens."""
    match state.phase:
        case Ended():
            return None
        case Training() | Gathering():
            deadline = None
        case Freezing(deadline=due):
            deadline = earliest(due, *_link_graces(state))
        case (
            Forming(deadline=due)
            | Preparing(deadline=due)
            | Flagged(deadline=due)
            | Switching(deadline=due)
            | Finishing(deadline=due)
            | Completing(deadline=due)
            | Ending(deadline=due)
        ):
            deadline = due
        case _ as never:
            assert_never(never)
    if isinstance(state.phase, Ending):
        return earliest(state.resend_at, deadline)
    failure = state.failure.deadline if state.failure is not None else None
    return earliest(state.resend_at, deadline, failure, state.stop_by)


def _link_graces(state: State) -> list[Instant]:
    """When machines whose link has closed count as lost in a freeze."""
    grace = seconds(state.config.link_grace_s)
    closed = [state.machines[name].unlinked_at for name in sorted(state.machines)]
    ends = [after(at, grace) for at in closed if at is not None]
    return [end for end in ends if end > state.moved_at]


def notice_gap(move: Move) -> None:
    """After a pause of this very process nobody is late: what they said waits to be read (C5)."""
    state, config = move.state, move.state.config
    is_paused = move.has_waited(state.moved_at, config.lost_after_s / 2)
    move.state = replace(state, moved_at=move.now)
    if not is_paused:
        return
    move.because("this controller was stopped for a while: nobody is late")
    for name in sorted(state.machines):
        move.keep_machine(replace(state.machines[name], heard_at=move.now))
    for name in sorted(state.workers):
        worker = state.workers[name]
        move.keep_worker(replace(worker, missing_since=None, stopped_since=None))
    phase = state.phase
    if isinstance(phase, Forming | Training | Gathering | Ended):
        return
    deadline = max(phase.deadline, move.in_(config.report_timeout_s))
    move.enter(replace(phase, deadline=deadline))


def on_due(move: Move) -> None:
    """Whatever `now` makes due, then the pool's upkeep, then repeats."""
    notices.check(move)
    losses.check_failure(move)
    losses.check_silence(move)
    _on_phase(move)
    if not isinstance(move.state.phase, Finishing | Completing | Ending | Ended):
        pool.refill(move)
        _on_phase_again(move)
        pool.let_go(move)
    if move.now >= move.state.resend_at and not isinstance(move.state.phase, Ended):
        interval_s = move.state.config.resend_interval_s
        move.state = replace(move.state, resend_at=move.in_(interval_s))
        resend(move)


def _on_phase(move: Move) -> None:
    phase = move.state.phase
    match phase:
        case Forming():
            forming.advance(move)
        case Training():
            _on_training(move, phase)
        case Preparing():
            if move.now >= phase.deadline:
                switchover.give_up(move, f"phase one not ready in time: {_names(phase.waiting)}")
        case Flagged():
            if move.now >= phase.deadline:
                switchover.give_up(move, "no rank has reached the flagged boundary in time")
        case Switching():
            if move.now >= phase.deadline:
                _on_late_switching(move, phase)
        case Freezing():
            recovery.check(move)
        case Gathering():
            recovery.advance(move)
        case Finishing():
            if move.now >= phase.deadline:
                finishing.complete(move, phase.step, is_stopped=phase.is_stopped)
        case Completing():
            ending.check_completed(move, phase)
        case Ending():
            ending.check(move)
        case Ended():
            pass
        case _ as never:
            assert_never(never)


def _on_phase_again(move: Move) -> None:
    """A slot that was just refilled may be the joiner that is waited for."""
    if isinstance(move.state.phase, Gathering):
        recovery.advance(move)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8])


def _on_late_switching(move: Move, phase: Switching) -> None:
    silent = tuple(n for n in lookup.participants(phase.plan) if n not in phase.dones)
    text = f"{recovery.NOT_PREPARED}: {_names(silent)}"
    match phase.plan.kind:
        case "form":
            for name in silent:
                pool.end(move, name, "was not prepared in time")
            forming.start_over(move, phase, text)
        case "planned":
            switchover.give_up(move, text)
        case "unplanned":
            recovery.on_late_cut_over(move, phase)
        case _ as never:
            assert_never(never)


def _on_training(move: Move, phase: Training) -> None:
    state, config = move.state, move.state.config
    if not phase.has_passed_gate and state.progress_gate >= max(state.target.step, 0):
        phase = replace(phase, has_passed_gate=True)
        move.enter(phase)
    if phase.unacknowledged:
        phase = _with_acknowledged(state, phase)
        move.enter(phase)
    is_heard = not phase.unacknowledged
    is_late = move.has_waited(phase.committed_at, config.release_timeout_s)
    if phase.has_passed_gate or (is_heard and is_late):
        _release_leavers(move)
    if incidents.has_to_close(move):
        incidents.close(move)
    finishing.suspend_if_all_leave(move)
    switchover.advance(move)


def _with_acknowledged(state: State, phase: Training) -> Training:
    """A progress page that shows the generation confirms its commit as well as a message does."""
    silent = []
    for name in phase.unacknowledged:
        worker = state.workers.get(name)
        seen = worker.status.generation if worker is not None and worker.status is not None else 0
        if seen != state.generation:
            silent.append(name)
    return replace(phase, unacknowledged=tuple(silent))


def _release_leavers(move: Move) -> None:
    for name in sorted(move.state.workers):
        worker = move.state.workers[name]
        if worker.role == "leaver":
            plans.release(move, name)
            number = worker.released_number
            move.tell(name, Release(term=move.state.term, number=number))
            move.reached("leaver_released", number)
            incidents.note(move, "leaver_released")


# --------------------------------------------------------------------------- repeats


def resend(move: Move) -> None:
    """Say again what has not been answered."""
    phase = move.state.phase
    if isinstance(phase, Ending):
        if phase.saves_until is None:
            ending.tell(move, phase)
        else:
            for machine, order in checkpoints.unanswered(move.state):
                move.send(machine, order)
        return
    for name in sorted(move.state.workers, key=lookup.natural_order):
        _resend_to_worker(move, move.state.workers[name])
    for name, body in unanswered(move):
        move.tell(name, body)
    _keep_states(move)
    classes.ask_again(move)
    finishing.ask_to_stop(move)


def _keep_states(move: Move) -> None:
    shelf.on_pulse(move)
    waited_for = checkpoints.unanswered(move.state)
    checkpoints.advance(move)
    for machine, order in waited_for:
        move.send(machine, order)
    fitting.tell(move)


def _resend_to_worker(move: Move, worker: Worker) -> None:
    match worker.role:
        case "ending":
            _resend_end(move, worker)
        case "starting":
            if worker.status is None and not worker.is_up:
                pool.order_launch(move, worker)
        case "standby":
            if worker.readiness is None and not worker.reason:
                pool.order_standby(move, worker)
        case "member" | "leaver":
            pass
        case _ as never:
            assert_never(never)


def _resend_end(move: Move, worker: Worker) -> None:
    since = worker.ending_since if worker.ending_since is not None else move.now
    is_late = move.has_waited(since, move.state.config.release_timeout_s)
    if worker.released_number and not is_late:
        body = Release(term=move.state.term, number=worker.released_number)
        move.tell(worker.incarnation, body)
    else:
        pool.order_end(move, worker)


def unanswered(move: Move) -> list[tuple[str, ToWorkerBody]]:
    """Messages to workers whose answers the phase waits for."""
    term, phase, state = move.state.term, move.state.phase, move.state
    found: list[tuple[str, ToWorkerBody]] = []
    match phase:
        case Training():
            found += [
                (name, Commit(term=term, number=state.generation)) for name in phase.unacknowledged
            ]
        case Preparing(plan=plan):
            found += [(name, Prepare(term=term, plan=plan)) for name in phase.waiting]
        case Flagged(plan=plan):
            flag = RaiseFlag(term=term, number=plan.number)
            found += [(name, flag) for name in lookup.member_names(state)]
        case Switching(plan=plan):
            if plan.kind == "unplanned":
                plans.freeze_joiners(move, plan)
            silent = [n for n in lookup.participants(plan) if n not in phase.dones]
            found += [(name, PlanIssued(term=term, plan=plan)) for name in silent]
        case Freezing(number=number):
            silent = [n for n in recovery.frozen_workers(move) if n not in phase.reports]
            found += [(name, Freeze(term=term, number=number)) for name in silent]
        case Gathering(number=number):
            # To those who have reported as well: a frozen worker that hears nothing gives up.
            freeze = Freeze(term=term, number=number)
            found += [(name, freeze) for name in lookup.member_names(state)]
        case Completing():
            found += [(name, Complete(term=term)) for name in lookup.member_names(state)]
        case Forming() | Finishing() | Ending() | Ended():
            pass
        case _ as never:
            assert_never(never)
    return found
