"""The worker's lifecycle: a pure decider between controller, channels and the main thread.

Decides what a worker does with each message and local event (rules W1-W16 of the protocol): when it
contributes to a gate, holds, runs out, reports, cuts over, commits, leaves or stops. Deliberately
not here: sockets, threads, tensors and clocks (worker/runtime.py), and every decision that needs
more than one worker's knowledge (controller/).

Invariants upheld here: I1 (no tainted contribution), I3 (nothing passes after a report), I5
(nobody runs uncommitted), I7 (one contribution per generation and gate), I12 (each wait ends).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from trainmover.protocol import exits
from trainmover.protocol.messages import (
    Abort,
    BecomeStandby,
    Commit,
    Complete,
    CostsMeasured,
    Facts,
    Fence,
    Freeze,
    KeepRecording,
    LinkLost,
    PlanIssued,
    Prepare,
    RaiseFlag,
    Release,
    StandbyReady,
    StopAtBoundary,
    StopNow,
    TakeSnapshot,
    ToWorkerBody,
    WorkerUp,
)
from trainmover.units import Instant, after, earliest, in_seconds, seconds
from trainmover.worker.events import (
    BoundaryReached,
    ChannelBroken,
    CutOverBroke,
    CutOverDone,
    DecideRecording,
    FinishMain,
    GateCompleted,
    GateRequested,
    LearnCosts,
    LinkDown,
    LinkUp,
    Local,
    MainFailed,
    NextGenerationFrame,
    PersonalReceived,
    PhaseOneBroke,
    PhaseOneDone,
    Poisoned,
    RunOutFailed,
    Send,
    Started,
    StopWorker,
    TailStruck,
    Tick,
)
from trainmover.worker.lifecycle_break import (
    break_generation,
    has_gap,
    is_waiting,
    notice_pause,
    on_channel_broken,
    on_freeze,
    on_poisoned,
    on_run_out_failed,
    on_tail_struck,
    report_if_settled,
)
from trainmover.worker.lifecycle_commit import (
    on_abort,
    on_commit,
    on_cut_over_broke,
    on_cut_over_done,
    on_next_generation_frame,
    on_release,
)
from trainmover.worker.lifecycle_state import (
    Building,
    Ended,
    Failed,
    Finished,
    HeldInGate,
    InGate,
    LifecycleConfig,
    NotEntered,
    Outgoing,
    Parked,
    Ready,
    Rehearsing,
    Running,
    RunningOut,
    Tail,
    Transition,
    WorkerState,
    join,
    post,
    run_out_limit_ns,
    stay,
)
from trainmover.worker.lifecycle_step import (
    flags_to_carry,
    on_boundary,
    on_gate_completed,
    on_gate_requested,
    on_main_failed,
    on_personal,
    replace_reason,
    stop,
    take_snapshot,
    try_contribute,
)
from trainmover.worker.lifecycle_switch import (
    on_become_standby,
    on_phase_one_broke,
    on_phase_one_done,
    on_plan,
    on_prepare,
    on_raise_flag,
)

Event = Local | ToWorkerBody

__all__ = [
    "Event",
    "LifecycleConfig",
    "Transition",
    "WorkerState",
    "flags_to_carry",
    "initial_state",
    "next_deadline",
    "transition",
]


def initial_state(
    config: LifecycleConfig, incarnation: str, *, facts: Facts | None = None, now: Instant
) -> WorkerState:
    """A worker whose process has just begun; `Started` is its first event."""
    return WorkerState(
        config=config,
        incarnation=incarnation,
        facts=facts if facts is not None else Facts(),
        heard_at=now,
        seen_at=now,
    )


def transition(state: WorkerState, event: Event, now: Instant) -> Transition:
    """What this worker does about `event`.

    Called on: one thread of the worker, one event at a time; commands are carried out in order.
    Blocks: never.
    """
    if isinstance(state.main, Ended):
        return stay(state, "this process ends")
    paused = notice_pause(state, now) if has_gap(state, now) else None
    before = paused.state if paused is not None else state
    if (in_a_step := _IN_A_STEP.get(type(event))) is not None:
        move = in_a_step(before, event, now)
    elif isinstance(event, ToWorkerBody):
        if event.term < state.term:
            return stay(replace(state, seen_at=now), "an old controller")
        move = _on_message(replace(before, term=event.term, heard_at=now), event, now)
    else:
        move = _on_local(before, event, now)
    if paused is not None and paused.commands:
        move = join(paused, move)
    if move.state.promise > move.state.generation:
        reported = report_if_settled(move.state, now)
        if reported.commands:
            move = join(move, reported)
    return Transition(_timed(state, move.state, now), move.commands, move.reason)


def _timed(before: WorkerState, state: WorkerState, now: Instant) -> WorkerState:
    since = state.waiting_since
    if not is_waiting(state):
        since = None
    elif since is None or before.main != state.main:
        since = now
    return replace(state, seen_at=now, waiting_since=since)


_IN_A_STEP: Final[dict[type, Callable[[WorkerState, Any, Instant], Transition]]] = {
    BoundaryReached: on_boundary,
    GateRequested: on_gate_requested,
    PersonalReceived: on_personal,
    GateCompleted: on_gate_completed,
}
"""Found at once: a step has five of these, each when nothing is in a cache."""


def _on_local(state: WorkerState, event: Local, now: Instant) -> Transition:
    match event:
        case BoundaryReached() | GateRequested() | PersonalReceived() | GateCompleted():
            return _IN_A_STEP[type(event)](state, event, now)
        case ChannelBroken():
            return on_channel_broken(state, event, now)
        case Poisoned():
            return on_poisoned(state, event, now)
        case NextGenerationFrame():
            return on_next_generation_frame(state, event, now)
        case PhaseOneDone():
            return on_phase_one_done(state, event, now)
        case PhaseOneBroke():
            return on_phase_one_broke(state, event, now)
        case CutOverDone():
            return on_cut_over_done(state, event, now)
        case CutOverBroke():
            return on_cut_over_broke(state, event, now)
        case MainFailed():
            return on_main_failed(state, event, now)
        case RunOutFailed():
            return on_run_out_failed(state, event)
        case TailStruck():
            return on_tail_struck(state, event, now)
        case Started() | LinkUp() | LinkDown() | Tick():
            return _on_process(state, event, now)


def _on_message(state: WorkerState, event: ToWorkerBody, now: Instant) -> Transition:
    match event:
        case BecomeStandby():
            return on_become_standby(state, event, now)
        case Prepare():
            return on_prepare(state, event, now)
        case RaiseFlag():
            return on_raise_flag(state, event)
        case Freeze():
            return on_freeze(state, event, now)
        case PlanIssued():
            return on_plan(state, event, now)
        case Commit():
            return on_commit(state, event, now)
        case Abort():
            return on_abort(state, event, now)
        case Release():
            return on_release(state, event, now)
        case TakeSnapshot(level=level):
            return take_snapshot(state, level)
        case CostsMeasured():
            return Transition(state, (LearnCosts(costs=event),), "what saves cost is known")
        case KeepRecording():
            return Transition(state, (DecideRecording(order=event),), "its class's keeper is known")
        case Fence() | Complete() | StopAtBoundary() | StopNow():
            return _on_end(state, event)


def _on_end(state: WorkerState, event: Fence | Complete | StopAtBoundary | StopNow) -> Transition:
    ended = replace(state, main=Ended(), outbox=())
    match event:
        case Fence(generation=generation, reason=reason):
            if generation < state.generation:
                return stay(state, "an old fence")
            command = StopWorker(code=exits.INTERRUPTED, reason=reason, is_fenced=True)
            return Transition(ended, (command,), f"fenced: {reason}")
        case Complete():
            if isinstance(state.main, Finished | HeldInGate | InGate):
                return Transition(ended, (FinishMain(),), "every rank has finished")
            return stop(state, exits.COMPLETED, "the job is complete")
        case StopAtBoundary():
            return stay(replace(state, is_stop_requested=True), "a stop rides on the next gate")
        case StopNow(code=code, reason=reason):
            return stop(state, code, reason)


def _on_process(
    state: WorkerState, event: Started | LinkUp | LinkDown | Tick, now: Instant
) -> Transition:
    match event:
        case Started(host=host, port=port, pid=pid):
            body = WorkerUp(
                incarnation=state.incarnation, host=host, port=port, pid=pid, facts=state.facts
            )
            return replace_reason(post(state, body, now), "up")
        case LinkDown():
            moved = replace(state, is_link_up=False, link_down_since=state.link_down_since or now)
            return stay(moved, "the control path is gone")
        case LinkUp():
            up = replace(state, is_link_up=True, link_down_since=None)
            return _resend(up, now, is_forced=True)
        case Tick():
            return _on_tick(state, now)


# ------------------------------------------------------------------------- time


def _resend_at(state: WorkerState, item: Outgoing) -> Instant:
    interval = state.config.resend_interval_s
    if isinstance(item.body, StandbyReady):
        interval = state.config.standby_resend_interval_s
    return after(item.sent_at, seconds(interval))


def _resend(state: WorkerState, now: Instant, *, is_forced: bool) -> Transition:
    if not state.is_link_up:
        return stay(state, "no control path")
    kept: list[Outgoing] = []
    sends: list[Send] = []
    for item in state.outbox:
        if not is_forced and _resend_at(state, item) > now:
            kept.append(item)
            continue
        sends.append(Send(body=item.body))
        left = item.sends_left - 1 if item.sends_left > 0 else item.sends_left
        if left != 0:
            kept.append(Outgoing(item.body, now, left))
    reason = f"repeats {len(sends)} messages" if sends else ""
    return Transition(replace(state, outbox=tuple(kept)), tuple(sends), reason)


def _limit(state: WorkerState) -> tuple[Instant | None, str]:
    """When the place `main` is in has been waited for too long, and what that is called."""
    config = state.config
    match state.main:
        case Ready(since=since) | InGate(since=since) if not state.is_broken:
            return after(since, seconds(config.gate_timeout_s)), "gate"
        case RunningOut(since=since):
            return Instant(since + run_out_limit_ns(state)), "run_out"
        case Tail(since=since, is_struck=True):
            return Instant(since + run_out_limit_ns(state)), "run_out"
        case Tail(since=since) if state.is_broken or state.is_frozen:
            return after(since, seconds(config.tail_timeout_s)), "tail"
        case Building(since=since) | Rehearsing(since=since):
            return after(since, seconds(config.build_timeout_s)), "build"
        case _:
            return None, ""


def _controller_limit(state: WorkerState) -> Instant | None:
    """When the controller has been silent too long for a wait that only it can end (W15)."""
    limit = seconds(state.config.controller_timeout_s)
    if state.waiting_since is not None:
        return after(max(state.waiting_since, state.heard_at), limit)
    is_idle = isinstance(state.main, NotEntered | Parked | Rehearsing)
    if is_idle and state.link_down_since is not None:
        return after(state.link_down_since, limit)
    return None


def _on_tick(state: WorkerState, now: Instant) -> Transition:
    limit, name = _limit(state)
    if limit is not None and now >= limit:
        return _too_long(state, name, now)
    lost_at = _controller_limit(state)
    if lost_at is not None and now >= lost_at:
        return _controller_lost(state, now)
    repeated = _resend(state, now, is_forced=False)
    is_ready = isinstance(state.main, Ready)
    return join(repeated, try_contribute(repeated.state, now)) if is_ready else repeated


def _too_long(state: WorkerState, name: str, now: Instant) -> Transition:
    if name == "gate":
        return break_generation(state, (), now)
    if name == "run_out":
        waited = in_seconds(run_out_limit_ns(state))
        return stop(state, exits.INTERRUPTED, f"W10: running out took over {waited:.1f} s")
    waited = state.config.tail_timeout_s if name == "tail" else state.config.build_timeout_s
    text = "W10: the tail took over" if name == "tail" else "main built for over"
    return stop(state, exits.INTERRUPTED, f"{text} {waited:.0f} s")


def _controller_lost(state: WorkerState, now: Instant) -> Transition:
    code = exits.SCRIPT_FAILED if isinstance(state.main, Failed) else exits.CONTROLLER_LOST
    waited = state.config.controller_timeout_s
    reason = f"no word from the controller for {waited:.0f} s while only it could decide"
    told = post(state, LinkLost(incarnation=state.incarnation, reason=reason, code=code), now)
    return join(told, stop(told.state, code, reason))


def next_deadline(state: WorkerState) -> Instant | None:
    """When `Tick` is due at the latest; None: only another event changes anything."""
    soonest: Instant | None = None
    if isinstance(state.main, Ended):
        return soonest
    if state.is_member and isinstance(state.main, Running | Ready | InGate):
        soonest = after(state.seen_at, seconds(state.config.pause_limit_s / 2))
        if isinstance(state.main, Ready) and state.suspect_until > state.seen_at:
            soonest = earliest(soonest, state.suspect_until)
    if state.outbox and state.is_link_up:
        soonest = earliest(soonest, *(_resend_at(state, item) for item in state.outbox))
    if not isinstance(state.main, Running):
        soonest = earliest(soonest, _limit(state)[0])
    if state.waiting_since is None and state.link_down_since is None:
        return soonest
    return earliest(soonest, _controller_limit(state))
