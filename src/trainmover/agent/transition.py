"""The agent's decider: obeys the highest term, keeps workers running without a link, says hello.

Decides launch, kill, hand-through, heartbeats, leaving and the end. Does not decide who plays
which rank (controller) nor how a process is started (edges).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from trainmover.agent import shelf, workers
from trainmover.agent.config import Config
from trainmover.agent.move import Move
from trainmover.agent.state import (
    NO_FACTS,
    CheckpointWriteFailed,
    Ended,
    Ending,
    Event,
    Exit,
    FromController,
    FromWorkerLink,
    LaunchFailed,
    Leaving,
    LinkDown,
    LinkUp,
    ManifestDone,
    ProcessExited,
    ProcessStarted,
    Pulse,
    Registering,
    Serving,
    ShardsDone,
    SnapshotsChanged,
    State,
    StopAsked,
    Tick,
    ToController,
    ToWorkerLink,
    Transition,
    Worker,
    WorkerLinked,
    WorkerUnlinked,
)
from trainmover.protocol import exits
from trainmover.protocol.messages import (
    AgentHello,
    AgentLeaving,
    CommitCheckpoint,
    Facts,
    Heartbeat,
    KeepSnapshots,
    KillWorker,
    LaunchWorkers,
    PlaceBackups,
    Refused,
    StopAgent,
    StopNow,
    ToAgentMessage,
    ToWorker,
    Welcome,
    WorkerStatus,
    WriteCheckpoint,
)
from trainmover.units import Instant, after, earliest, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who the agent is."""

    config: Config
    machine: str
    incarnation: str
    facts: Facts = NO_FACTS
    labels: tuple[tuple[str, str], ...] = ()


def initial_state(
    identity: Identity, now: Instant, live_workers: tuple[WorkerStatus, ...] = ()
) -> State:
    """State of an agent that has just started; `live_workers` outlived the agent before it."""
    adopted = {
        status.incarnation: Worker(
            incarnation=status.incarnation,
            local_rank=status.local_rank,
            pid=status.pid,
            status=status,
        )
        for status in live_workers
    }
    return State(
        config=identity.config,
        machine=identity.machine,
        incarnation=identity.incarnation,
        phase=Registering(),
        facts=identity.facts,
        labels=identity.labels,
        unlinked_since=now,
        workers=adopted,
        heartbeat_at=now,
    )


def transition(state: State, event: Event, now: Instant) -> Transition:
    """One move: what `event` changes and causes, then whatever is due at `now`."""
    move = Move(state, now)
    if isinstance(state.phase, Ended):
        return move.done()
    _on_event(move, event)
    _on_due(move)
    return move.done()


def next_deadline(state: State) -> Instant | None:
    """When the agent has to move even if nothing happens."""
    config = state.config
    kills = [
        after(worker.killed_at, seconds(config.kill_grace_s))
        for _, worker in sorted(state.workers.items())
        if worker.killed_at is not None
    ]
    match state.phase:
        case Ended():
            return None
        case Ending(deadline=deadline) | Leaving(deadline=deadline):
            phase_deadline: Instant | None = deadline
        case Registering() | Serving():
            phase_deadline = None
        case _ as never:
            assert_never(never)
    if state.is_welcomed:
        link_deadline = state.heartbeat_at
    else:
        link_deadline = after(state.unlinked_since, seconds(config.controller_timeout_s))
    return earliest(phase_deadline, link_deadline, *kills)


# --------------------------------------------------------------------------- events


def _on_event(move: Move, event: Event) -> None:
    match event:
        case FromController(body=body):
            _on_controller(move, body)
        case LinkUp():
            _on_link_up(move)
        case LinkDown():
            _on_link_down(move)
        case WorkerLinked():
            workers.on_linked(move, event)
        case WorkerUnlinked(incarnation=name):
            move.because(f"{name} unlinked")
        case FromWorkerLink():
            workers.on_message_of(move, event)
        case ProcessStarted():
            workers.on_started(move, event)
        case ProcessExited():
            workers.on_exited(move, event)
        case LaunchFailed():
            workers.on_launch_failed(move, event)
        case Pulse():
            workers.on_pulse(move, event)
        case SnapshotsChanged():
            shelf.on_changed(move, event)
        case ShardsDone() | ManifestDone() | CheckpointWriteFailed():
            shelf.on_written(move, event)
        case StopAsked(reason=reason):
            _on_stop_asked(move, reason)
        case Tick():
            pass
        case _ as never:
            assert_never(never)


def _on_link_up(move: Move) -> None:
    state = move.state
    move.state = replace(state, is_linked=True, is_welcomed=False)
    hello = AgentHello(
        machine=state.machine,
        incarnation=state.incarnation,
        term_seen=state.term,
        facts=state.facts,
        labels=state.labels,
        workers=workers.statuses(move),
    )
    move.do(ToController(body=hello))
    move.because("say hello")


def _on_link_down(move: Move) -> None:
    since = move.now if move.state.is_welcomed else move.state.unlinked_since
    move.state = replace(move.state, is_linked=False, is_welcomed=False, unlinked_since=since)
    move.because("link down, workers run on")


def _on_controller(move: Move, body: ToAgentMessage) -> None:
    if body.term < move.state.term:
        move.because(f"term {body.term} is over, {move.state.term} is the highest heard of")
        return
    move.state = replace(move.state, term=body.term)
    match body:
        case Welcome():
            _on_welcome(move, body)
        case Refused(code=code, reason=reason):
            _end(move, code, f"refused by the controller: {reason}", grace_s=0.0)
        case StopAgent(code=code, reason=reason, grace_s=grace_s):
            _end(move, code, reason, grace_s=grace_s)
        case LaunchWorkers():
            if isinstance(move.state.phase, Serving | Leaving):
                workers.on_launch(move, body, move.state.phase.spec)
        case KillWorker():
            workers.on_kill(move, body)
        case ToWorker():
            workers.on_message_for(move, body)
        case PlaceBackups() | KeepSnapshots() | WriteCheckpoint() | CommitCheckpoint():
            if isinstance(move.state.phase, Serving | Leaving):
                shelf.on_order(move, body)
        case _ as never:
            assert_never(never)


def _on_welcome(move: Move, welcome: Welcome) -> None:
    if not move.state.is_linked:
        return  # of a link that is gone already
    outbox = move.state.outbox
    move.state = replace(move.state, is_welcomed=True, outbox=(), heartbeat_at=move.now)
    if isinstance(move.state.phase, Registering):
        move.enter(Serving(spec=welcome.spec))
    workers.introduce(move)
    shelf.introduce(move)
    for message in (*move.state.recent, *outbox):
        move.tell(message)
    move.because(f"welcomed in term {welcome.term}")


def _on_stop_asked(move: Move, reason: str) -> None:
    match move.state.phase:
        case Serving(spec=spec):
            deadline = move.in_(move.state.config.leave_timeout_s)
            move.enter(Leaving(spec=spec, reason=reason, deadline=deadline))
            move.tell(AgentLeaving(machine=move.state.machine, reason=reason))
            move.because(f"asked to leave: {reason}")
        case Registering() | Leaving():
            _end(move, exits.INTERRUPTED, reason, grace_s=move.state.config.kill_grace_s)
        case Ending():
            _kill_and_end(move)
        case Ended():
            pass
        case _ as never:
            assert_never(never)


# --------------------------------------------------------------------------- the end


def _end(move: Move, code: int, reason: str, *, grace_s: float) -> None:
    if isinstance(move.state.phase, Ending):
        return  # told already; the first reason counts
    move.enter(Ending(code=code, reason=reason, deadline=move.in_(grace_s)))
    for name in sorted(move.state.workers):
        stop = StopNow(term=move.state.term, code=code, reason=reason)
        move.do(ToWorkerLink(incarnation=name, body=stop))
    move.because(f"end with {code}: {reason}")


def _kill_and_end(move: Move) -> None:
    phase = move.state.phase
    if isinstance(phase, Ending) and not phase.is_killing:
        deadline = move.in_(2 * move.state.config.kill_grace_s)
        move.enter(replace(phase, is_killing=True, deadline=deadline))
        workers.kill_all(move)


def _exit(move: Move, phase: Ending) -> None:
    move.enter(Ended(code=phase.code))
    move.do(Exit(code=phase.code, reason=phase.reason))


def _on_due(move: Move) -> None:
    state, now = move.state, move.now
    lost_at = after(state.unlinked_since, seconds(state.config.controller_timeout_s))
    is_ending = isinstance(state.phase, Ending)
    if not state.is_welcomed and now >= lost_at and not is_ending:
        text = f"no controller for {state.config.controller_timeout_s:g} s"
        _end(move, exits.CONTROLLER_LOST, text, grace_s=0.0)
    _on_phase_due(move)
    if isinstance(move.state.phase, Ended):
        return
    workers.kill_again(move)
    if state.is_welcomed and now >= state.heartbeat_at:
        _beat(move)


def _on_phase_due(move: Move) -> None:
    phase = move.state.phase
    if isinstance(phase, Leaving) and move.now >= phase.deadline:
        text = f"asked to leave ({phase.reason}); nobody took over in time"
        _end(move, exits.INTERRUPTED, text, grace_s=move.state.config.kill_grace_s)
        phase = move.state.phase
    if not isinstance(phase, Ending):
        return
    if not move.state.workers:
        _exit(move, phase)
    elif move.now >= phase.deadline and phase.is_killing:
        move.because("some workers' ends were not seen")
        _exit(move, phase)
    elif move.now >= phase.deadline:
        _kill_and_end(move)


def _beat(move: Move) -> None:
    state = move.state
    move.tell(
        Heartbeat(
            machine=state.machine,
            incarnation=state.incarnation,
            workers=workers.statuses(move),
        )
    )
    shelf.repeat(move)
    if isinstance(state.phase, Leaving):
        move.tell(AgentLeaving(machine=state.machine, reason=state.phase.reason))
    at = move.in_(state.config.heartbeat_interval_s)
    move.state = replace(move.state, heartbeat_at=at)
