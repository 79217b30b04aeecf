"""The controller's decider: dispatches events to the handlers of its phases.

Decides which handler sees an event, and answers what belongs to numbers that are over. Everything
else is decided by forming, switchover, recovery, finishing, losses and pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from trainmover.controller import (
    classes,
    ending,
    finishing,
    fitting,
    incidents,
    looking,
    lookup,
    losses,
    notices,
    plans,
    pool,
    recovery,
    shelf,
    stores,
    switchover,
    tails,
    timers,
)
from trainmover.controller.events import (
    AgentLinked,
    AgentUnlinked,
    Event,
    FromAgent,
    FromOperator,
    StorageSeen,
    Tick,
)
from trainmover.controller.move import Move
from trainmover.controller.state import (
    Ended,
    Ending,
    Flagged,
    Preparing,
    State,
    Switching,
    Training,
    Transition,
    Worker,
)
from trainmover.protocol import exits
from trainmover.protocol.journal import IdentitiesKnown
from trainmover.protocol.messages import (
    Abort,
    AgentHello,
    AgentLeaving,
    AtBoundary,
    Broken,
    CadenceChosen,
    CheckpointCommitted,
    CheckpointFailed,
    Commit,
    CommitAcknowledged,
    Coverage,
    Done,
    Finding,
    FinishPassed,
    FirstGate,
    FromAgentMessage,
    FromOperatorMessage,
    FromWorker,
    FromWorkerBody,
    Heartbeat,
    InTail,
    KillWorker,
    LinkLost,
    LossAlarm,
    Lost,
    PhaseOneFailed,
    PhaseOneReady,
    PreemptionNotice,
    RecordingStored,
    Report,
    RestoreChecked,
    RoleClass,
    SaveRequest,
    ScriptFailed,
    ShardsWritten,
    SnapshotFailed,
    SnapshotsHeld,
    SnapshotTaken,
    StandbyFailed,
    StandbyReady,
    StepLogged,
    StopRequest,
    SwitchoverRequest,
    Tracked,
    WorkerExited,
    WorkerLaunchFailed,
    WorkerStarted,
    WorkerUp,
)
from trainmover.units import Instant


def transition(state: State, event: Event, now: Instant) -> Transition:
    """One move: what `event` changes and causes, then whatever is due at `now`."""
    move = Move(state, now)
    if isinstance(state.phase, Ended):
        return move.done()
    timers.notice_gap(move)
    match event:
        case FromAgent(machine=machine, body=agent_body):
            _on_agent(move, machine, agent_body)
        case AgentLinked(machine=machine):
            _on_linked(move, machine)
        case AgentUnlinked(machine=machine):
            _on_unlinked(move, machine)
        case FromOperator(body=operator_body):
            _on_operator(move, operator_body)
        case StorageSeen():
            looking.on_seen(move, event)
        case Tick():
            pass
        case _ as never:
            assert_never(never)
    timers.on_due(move)
    fitting.measure(move, state.kept)
    return move.done()


# --------------------------------------------------------------------------- links


def _on_linked(move: Move, name: str) -> None:
    machine = move.state.machines.get(name)
    if machine is not None:
        shelf.touch(move)
        move.keep_machine(replace(machine, is_linked=True, unlinked_at=None, heard_at=move.now))


def _on_unlinked(move: Move, name: str) -> None:
    machine = move.state.machines.get(name)
    if machine is None:
        return
    if machine.is_linked:
        machine = replace(machine, is_linked=False, unlinked_at=move.now)
        move.keep_machine(machine)
        shelf.touch(move)
    move.because(f"link of {name} closed")
    if isinstance(move.state.phase, Ending):
        ending.on_unlinked(move, move.state.phase, name)


def _on_operator(move: Move, body: FromOperatorMessage) -> None:
    match body:
        case SwitchoverRequest():
            switchover.on_request(move, body)
        case StopRequest():
            finishing.on_stop_request(move, body)
        case PreemptionNotice():
            notices.on_notice(move, body)
        case SaveRequest():
            notices.on_save(move, body)
        case _ as never:
            assert_never(never)


# --------------------------------------------------------------------------- agents


def _on_agent(move: Move, name: str, body: FromAgentMessage) -> None:
    if isinstance(move.state.phase, Ending):
        stores.on_agent_while_ending(move, name, body)
        return
    machine = move.state.machines.get(name)
    if machine is None and not isinstance(body, AgentHello):
        return  # its hello has not come; it says hello on every link
    if machine is not None:
        move.keep_machine(replace(machine, heard_at=move.now))
    match body:
        case AgentHello():
            pool.on_hello(move, body)
            shelf.on_hello(move, body)
        case Heartbeat():
            _on_heartbeat(move, body)
        case WorkerStarted():
            _on_started(move, body)
        case WorkerLaunchFailed(incarnation=incarnation, reason=reason):
            losses.worker_gone(move, incarnation, f"could not be started: {reason}")
        case WorkerExited():
            losses.worker_gone(move, body.incarnation, losses.how_it_ended(body))
        case FromWorker(incarnation=incarnation, body=worker_body):
            _on_worker(move, incarnation, worker_body, name)
        case AgentLeaving(reason=reason, grace_s=grace_s):
            notices.on_leaving(move, name, reason, grace_s)
        case SnapshotsHeld() | ShardsWritten() | CheckpointFailed() | CheckpointCommitted():
            stores.on_kept(move, body)
        case _ as never:
            assert_never(never)


def _on_heartbeat(move: Move, body: Heartbeat) -> None:
    machine = move.state.machines[body.machine]
    if machine.is_lost:
        move.keep_machine(replace(machine, is_lost=False, reason=""))
    for name in pool.on_statuses(move, body.machine, body.workers):
        losses.worker_gone(move, name, "its agent does not know it any more")


def _on_started(move: Move, body: WorkerStarted) -> None:
    worker = move.state.workers.get(body.incarnation)
    if worker is None:
        order = KillWorker(
            term=move.state.term, incarnation=body.incarnation, reason="not needed any more"
        )
        if body.incarnation in move.state.retired:
            move.send(body.machine, order)


# --------------------------------------------------------------------------- workers


def _on_worker(move: Move, name: str, body: FromWorkerBody, machine: str) -> None:
    worker = move.state.workers.get(name)
    if worker is None:
        if name in move.state.retired:
            reason = "replaced"
            move.send(machine, KillWorker(term=move.state.term, incarnation=name, reason=reason))
        return
    match body:
        case WorkerUp():
            pool.on_up(move, worker, body)
        case StandbyReady():
            pool.on_ready(move, worker, body)
        case StandbyFailed(reason=reason):
            pool.on_not_ready(move, worker, body)
            losses.participant_lost(move, name, f"can't be a standby: {reason}")
        case Tracked():
            _on_tracked(move, body)
        case Broken():
            losses.on_broken(move, worker, body)
        case Report():
            recovery.on_report(move, worker, body)
        case InTail():
            tails.on_in_tail(move, worker, body)
        case AtBoundary() | PhaseOneReady() | PhaseOneFailed() | Done() | Lost():
            _on_numbered(move, worker, body)
        case CommitAcknowledged(number=number):
            _on_acknowledged(move, name, number)
        case FirstGate():
            _on_first_gate(move, body)
        case FinishPassed():
            finishing.on_finish_passed(move, body)
        case ScriptFailed():
            losses.on_script_failed(move, worker, body)
        case LinkLost(reason=reason):
            losses.worker_ended_by_us(move, name, f"worker {name} gave up: {reason}")
        case RoleClass():
            classes.on_role_class(move, body)
            pool.order_waiting(move)
        case RecordingStored():
            classes.on_stored(move, body)
            pool.order_waiting(move)
        case SnapshotFailed():
            shelf.on_missed(move, body)
        case LossAlarm():
            notices.on_alarm(move, body)
        case (
            StepLogged()
            | Finding()
            | Coverage()
            | RestoreChecked()
            | SnapshotTaken()
            | CadenceChosen()
        ):
            pass  # kept by the daemon, not for the decider
        case _ as never:
            assert_never(never)


def _on_numbered(
    move: Move, worker: Worker, body: AtBoundary | PhaseOneReady | PhaseOneFailed | Done | Lost
) -> None:
    phase = move.state.phase
    if not isinstance(phase, Preparing | Flagged | Switching) or phase.plan.number != body.number:
        _answer_closed(move, worker, body.number)
        return
    match body:
        case AtBoundary():
            switchover.on_boundary(move, body)
        case PhaseOneReady():
            if isinstance(phase, Preparing):
                switchover.on_ready(move, phase, body.incarnation)
        case PhaseOneFailed(edge=edge) | Lost(edge=edge):
            losses.on_plan_edge(move, body.incarnation, body.number, edge)
        case Done():
            # A rank that stopped and went straight on names the boundary as well.
            switchover.on_boundary(move, body)
            if isinstance(move.state.phase, Switching):
                _on_done(move, move.state.phase, body)
        case _ as never:
            assert_never(never)


def _answer_closed(move: Move, worker: Worker, number: int) -> None:
    """The number is over: say how it ended (protocol 20); both answers are idempotent."""
    if number == move.state.generation:
        move.tell(worker.incarnation, Commit(term=move.state.term, number=number))
    elif number > move.state.highest_number:
        move.note_number(number)
    else:
        body = Abort(term=move.state.term, number=number, reason="was aborted")
        move.tell(worker.incarnation, body)


def _on_done(move: Move, phase: Switching, body: Done) -> None:
    conflict = plans.on_done(move, phase, body)
    if not conflict:
        return
    match phase.plan.kind:
        case "planned":
            switchover.give_up(move, conflict)
        case "unplanned" if phase.plan.joiners:
            for name in phase.plan.joiners:
                pool.end(move, name, conflict)
            recovery.refreeze(move, conflict)
        case "form" | "unplanned":
            ending.stop(move, exits.PROTOCOL_FAILED, conflict)
        case _ as never:
            assert_never(never)


def _on_acknowledged(move: Move, name: str, number: int) -> None:
    phase = move.state.phase
    if isinstance(phase, Training) and number == move.state.generation:
        left = tuple(each for each in phase.unacknowledged if each != name)
        move.enter(replace(phase, unacknowledged=left))


def _on_tracked(move: Move, body: Tracked) -> None:
    state = move.state
    if state.membership is None or state.membership.rank_of(body.incarnation) != body.rank:
        return
    known = list(state.identities) + [""] * (state.spec.world_size - len(state.identities))
    known[body.rank] = body.identity
    identities = tuple(known)
    if identities != state.identities and all(identities):
        move.append(IdentitiesKnown(identities=identities))
    move.state = replace(state, identities=identities)
    phase = state.phase
    if isinstance(phase, Training):
        left = tuple(each for each in phase.untracked if each != body.incarnation)
        move.enter(replace(phase, untracked=left))


def _on_first_gate(move: Move, body: FirstGate) -> None:
    phase, membership = move.state.phase, move.state.membership
    if body.generation != move.state.generation or membership is None:
        return
    rank = membership.rank_of(body.incarnation)
    if rank is not None:
        incidents.on_first_gate(move, rank, body)
    if isinstance(phase, Training):
        # A passed gate proves that every rank has entered it, hence has built `main`.
        move.enter(replace(phase, has_passed_gate=True, untracked=()))
    step = max(move.state.step, body.step + 1, lookup.known_step(move.state))
    move.state = replace(move.state, step=step)
