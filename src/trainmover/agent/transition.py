"""The agent's decider: obeys the highest term, keeps workers running without a link, says hello.

Decides launch, kill, hand-through, heartbeats, leaving and the end. Does not decide who plays
which rank (controller) nor how a process is started (edges).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from trainmover.agent import leaving, shelf, workers
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
    Transition,
    Worker,
    WorkerLinked,
    WorkerUnlinked,
)
from trainmover.protocol import exits
from trainmover.protocol.messages import (
    AgentHello,
    CommitCheckpoint,
    Facts,
    Heartbeat,
    KeepSnapshots,
    KillWorker,
    LaunchWorkers,
    PlaceBackups,
    Refused,
    StopAgent,
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
        case StopAsked():
            leaving.on_stop_asked(move, event)
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
            leaving.end(move, code, f"refused by the controller: {reason}", grace_s=0.0)
        case StopAgent(code=code, reason=reason, grace_s=grace_s):
            leaving.end(move, code, reason, grace_s=grace_s)
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


# --------------------------------------------------------------------------- the end


def _exit(move: Move, phase: Ending) -> None:
    move.enter(Ended(code=phase.code))
    move.do(Exit(code=phase.code, reason=phase.reason))


def _on_due(move: Move) -> None:
    state, now = move.state, move.now
    lost_at = after(state.unlinked_since, seconds(state.config.controller_timeout_s))
    is_ending = isinstance(state.phase, Ending)
    if not state.is_welcomed and now >= lost_at and not is_ending:
        text = f"no controller for {state.config.controller_timeout_s:g} s"
        leaving.end(move, exits.CONTROLLER_LOST, text, grace_s=0.0)
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
        leaving.end(move, exits.INTERRUPTED, text, grace_s=move.state.config.kill_grace_s)
        phase = move.state.phase
    if not isinstance(phase, Ending):
        return
    if not move.state.workers:
        _exit(move, phase)
    elif move.now >= phase.deadline and phase.is_killing:
        move.because("some workers' ends were not seen")
        _exit(move, phase)
    elif move.now >= phase.deadline:
        leaving.kill_and_end(move)


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
        move.tell(leaving.news(move, state.phase))
    at = move.in_(state.config.heartbeat_interval_s)
    move.state = replace(move.state, heartbeat_at=at)
