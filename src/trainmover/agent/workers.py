"""What the agent does for its workers: start, adopt, kill, bury, and hand messages through.

Launching is idempotent by incarnation. The end of a worker is told only after what is left of its
process group has been killed, so that nothing of a lost rank can act any more (protocol C2).
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.agent.move import Move
from trainmover.agent.state import (
    FromWorkerLink,
    Kill,
    Launch,
    LaunchFailed,
    OpenSnapshot,
    ProcessExited,
    ProcessStarted,
    Pulse,
    ToWorkerLink,
    Worker,
    WorkerLinked,
)
from trainmover.protocol.messages import (
    Coverage,
    Finding,
    FromWorker,
    JobSpec,
    KillWorker,
    LaunchWorkers,
    LinkLost,
    LossAlarm,
    RecordingStored,
    RestoreChecked,
    RoleClass,
    ScriptFailed,
    SnapshotFailed,
    SnapshotTaken,
    StandbyFailed,
    StandbyReady,
    StepLogged,
    ToWorker,
    WorkerExited,
    WorkerLaunch,
    WorkerLaunchFailed,
    WorkerStarted,
    WorkerStatus,
    WorkerUp,
)

ENDED_LIMIT = 32
"""Last ends that are said again to a controller that asks; older ones count as simply ended."""
SAID_ONCE = (
    StepLogged,
    Finding,
    ScriptFailed,
    LinkLost,
    RoleClass,
    RecordingStored,
    Coverage,
    RestoreChecked,
    SnapshotFailed,
    LossAlarm,
)
"""Messages of workers that nobody repeats."""


def statuses(move: Move) -> tuple[WorkerStatus, ...]:
    """Every live worker, by incarnation, as the last probe saw it."""
    found = []
    for name in sorted(move.state.workers):
        worker = move.state.workers[name]
        if worker.pid == 0:
            continue
        bare = WorkerStatus(incarnation=name, local_rank=worker.local_rank, pid=worker.pid)
        found.append(worker.status if worker.status is not None else bare)
    return tuple(found)


def report_of(move: Move, incarnation: str) -> WorkerExited | WorkerLaunchFailed | None:
    """How a worker of ours ended; None if it has not."""
    for report in reversed(move.state.ended):
        if report.incarnation == incarnation:
            return report
    return None


def on_launch(move: Move, order: LaunchWorkers, spec: JobSpec) -> None:
    """Start what does not run yet; say again what is known of the rest."""
    for launch in order.launches:
        known = move.state.workers.get(launch.incarnation)
        report = report_of(move, launch.incarnation)
        if report is not None:
            move.tell(report)
        elif known is None:
            _launch(move, launch, spec)
        elif known.pid:
            move.tell(_started(move, known))


def _launch(move: Move, launch: WorkerLaunch, spec: JobSpec) -> None:
    move.keep(Worker(incarnation=launch.incarnation, local_rank=launch.local_rank))
    move.do(Launch(launch=launch, spec=spec))
    move.because(f"launch {launch.incarnation}")


def _started(move: Move, worker: Worker) -> WorkerStarted:
    return WorkerStarted(
        machine=move.state.machine,
        incarnation=worker.incarnation,
        local_rank=worker.local_rank,
        pid=worker.pid,
    )


def on_kill(move: Move, order: KillWorker) -> None:
    """Kill a worker; one that is not here any more is reported as ended."""
    worker = move.state.workers.get(order.incarnation)
    if worker is not None:
        move.do(Kill(incarnation=order.incarnation))
        move.keep(replace(worker, killed_at=move.now))
        move.because(f"kill {order.incarnation}: {order.reason}")
        return
    report = report_of(move, order.incarnation)
    if report is None:
        # An agent that was restarted may have missed it: whatever is left must not live on.
        move.do(Kill(incarnation=order.incarnation))
        report = WorkerExited(
            machine=move.state.machine,
            incarnation=order.incarnation,
            exit_code=None,
            signal=9,
        )
    move.tell(report)


def on_message_for(move: Move, order: ToWorker) -> None:
    """Hand a message to a worker, or say that it is over."""
    if order.incarnation in move.state.workers:
        move.do(ToWorkerLink(incarnation=order.incarnation, body=order.body))
        return
    report = report_of(move, order.incarnation)
    if report is not None:
        move.tell(report)


def on_linked(move: Move, event: WorkerLinked) -> None:
    """A worker connected; one that we don't know outlived the agent before us."""
    known = move.state.workers.get(event.incarnation)
    if known is not None:
        move.keep(replace(known, pid=known.pid or event.pid))
    elif report_of(move, event.incarnation) is None:
        adopted = Worker(
            incarnation=event.incarnation, local_rank=event.local_rank, pid=event.pid or -1
        )
        move.keep(adopted)
        move.because(f"adopt {event.incarnation}")


def on_message_of(move: Move, event: FromWorkerLink) -> None:
    """Hand a worker's message on, and remember what introduces it to another controller.

    A snapshot is this machine's business: the controller hears what is held, not what was taken.
    """
    if isinstance(event.body, SnapshotTaken):
        move.do(OpenSnapshot(incarnation=event.incarnation, taken=event.body))
        return
    worker = move.state.workers.get(event.incarnation)
    if worker is not None:
        match event.body:
            case WorkerUp() as up:
                move.keep(replace(worker, up=up))
            case StandbyReady() | StandbyFailed() as readiness:
                move.keep(replace(worker, readiness=readiness))
            case _:
                pass
    message = FromWorker(machine=move.state.machine, incarnation=event.incarnation, body=event.body)
    if isinstance(event.body, SAID_ONCE):
        move.tell_surely(message)
    else:
        move.tell(message)


def introduce(move: Move) -> None:
    """Tell a controller that has just welcomed us what our workers had said to another."""
    for name in sorted(move.state.workers):
        worker = move.state.workers[name]
        for body in (worker.up, worker.readiness):
            if body is not None:
                move.tell(FromWorker(machine=move.state.machine, incarnation=name, body=body))


def on_started(move: Move, event: ProcessStarted) -> None:
    """The process of a launched worker exists."""
    worker = move.state.workers.get(event.incarnation)
    if worker is None:
        return
    started = replace(worker, pid=event.pid)
    move.keep(started)
    move.tell(_started(move, started))
    if started.killed_at is not None:
        move.do(Kill(incarnation=event.incarnation))


def on_launch_failed(move: Move, event: LaunchFailed) -> None:
    """A worker could not be started."""
    if event.incarnation not in move.state.workers:
        return
    report = WorkerLaunchFailed(
        machine=move.state.machine, incarnation=event.incarnation, reason=event.reason
    )
    _bury(move, report)
    move.because(f"{event.incarnation} not started: {event.reason}")


def on_exited(move: Move, event: ProcessExited) -> None:
    """A worker ended: first its children, then the report."""
    if report_of(move, event.incarnation) is not None:
        return
    move.do(Kill(incarnation=event.incarnation))
    report = WorkerExited(
        machine=move.state.machine,
        incarnation=event.incarnation,
        exit_code=event.exit_code,
        signal=event.signal,
        log_tail=event.log_tail,
    )
    _bury(move, report)
    move.because(f"{event.incarnation} ended")


def _bury(move: Move, report: WorkerExited | WorkerLaunchFailed) -> None:
    move.forget(report.incarnation)
    ended = (*move.state.ended, report)[-ENDED_LIMIT:]
    move.state = replace(move.state, ended=ended)
    move.tell_surely(report)


def on_pulse(move: Move, event: Pulse) -> None:
    """What the probe saw of workers we know."""
    for status in event.workers:
        worker = move.state.workers.get(status.incarnation)
        if worker is not None:
            move.keep(replace(worker, status=status, pid=worker.pid or status.pid))


def kill_all(move: Move) -> None:
    """Kill every worker, again if need be."""
    for name in sorted(move.state.workers):
        move.do(Kill(incarnation=name))
        move.keep(replace(move.state.workers[name], killed_at=move.now))


def kill_again(move: Move) -> None:
    """Repeat kills whose effect has not been seen."""
    for name in sorted(move.state.workers):
        worker = move.state.workers[name]
        if worker.killed_at is not None and move.now >= kill_deadline(move, worker):
            move.do(Kill(incarnation=name))
            move.keep(replace(worker, killed_at=move.now))


def kill_deadline(move: Move, worker: Worker) -> int:
    """When a kill is repeated."""
    killed_at = worker.killed_at if worker.killed_at is not None else move.now
    return killed_at + round(move.state.config.kill_grace_s * 1e9)
