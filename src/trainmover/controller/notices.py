"""Notices of an end: the whole job's, or a machine's; what is done in the time that is left.

Decides by measured times: a checkpoint that fits is made, one that does not is not begun; ranks of
a machine that goes move to a standby if a switchover fits; otherwise all ranks take a snapshot at
once, whose copies on other machines outlive it. All ranks stop or save at the same step, because
the gate tells them. Says what was chosen, and why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainmover.controller import ending, fitting, lookup, shelf, switchover
from trainmover.controller.move import Move
from trainmover.controller.state import Ended, Ending, Machine, Training
from trainmover.protocol.journal import NoticeRecorded
from trainmover.protocol.messages import (
    LossAlarm,
    OperatorReply,
    PreemptionNotice,
    SaveRequest,
)
from trainmover.units import Instant, after, seconds

RESERVE_SHARE: Final = 0.3
MOST_RESERVE_S: Final = 4.0
"""Of a job's last seconds: for the end of its processes."""
EARLIER_S: Final = 0.5
"""How much earlier than its agents' the job's own end is."""

# --------------------------------------------------------------------------- the whole job


def limit(move: Move, grace_s: float) -> str:
    """The job has to have ended in `grace_s`; what that leaves time for, in words."""
    usable_s = grace_s - min(MOST_RESERVE_S, RESERVE_SHARE * grace_s)
    _end_by(move, move.in_(usable_s))
    choice = choose(move)
    move.append(NoticeRecorded(machines=(), grace_s=grace_s, choice=choice))
    return f"{grace_s:g} s are left: {choice}"


def _end_by(move: Move, instant: Instant) -> None:
    known = move.state.stop_by
    if known is None or instant < known:
        move.state = replace(move.state, stop_by=instant)


def choose(move: Move) -> str:
    """What is done with the state at the last boundary, and why."""
    state, kept = move.state, move.state.kept
    if not kept.keeping.checkpoint.is_on:
        return "nothing can be saved, there is no place for checkpoints (--checkpoints)"
    cost = fitting.cost_text(kept)
    if fitting.does_save_fit(state, move.now):
        return f"the last state goes to storage; {cost}"
    if kept.durable is None:
        return f"{cost}: that does not fit, and there is no earlier one"
    return f"{cost}: that does not fit; the one of step {kept.durable.version.step} stays"


def check(move: Move) -> None:
    """The time is over: end, saved or not."""
    state = move.state
    if state.stop_by is None or move.now < state.stop_by or isinstance(state.phase, Ending | Ended):
        return
    code, reason = ending.how_stopped(state)
    ending.stop(move, code, f"{reason}; the time that was left is over")


def hurry(move: Move) -> None:
    """Every machine with ranks is about to go: the first one that goes ends the job's time."""
    for name in _machines_with_ranks(move):
        machine = move.state.machines.get(name)
        if machine is not None and machine.leave_by is not None:
            _end_by(move, after(machine.leave_by, seconds(-EARLIER_S)))


def _machines_with_ranks(move: Move) -> tuple[str, ...]:
    membership = move.state.membership
    return membership.machines() if membership is not None else ()


# --------------------------------------------------------------------------- one machine


def on_leaving(move: Move, name: str, reason: str, grace_s: float) -> str:
    """`name` is about to go, in `grace_s` if that is above 0; what is done about it, in words."""
    machine = move.state.machines[name]
    if machine.is_retired:
        return f"{name} has left already"
    leave_by = move.in_(grace_s) if grace_s > 0 else None
    if machine.is_leaving:
        if leave_by is not None and _is_earlier(leave_by, machine.leave_by):
            move.keep_machine(replace(machine, leave_by=leave_by))
        return f"{name} is leaving already"
    machine = replace(machine, is_leaving=True, leave_by=leave_by, reason=f"is leaving: {reason}")
    move.keep_machine(machine)
    shelf.touch(move)
    choice = _secure(move, machine)
    move.append(NoticeRecorded(machines=(name,), grace_s=grace_s, choice=choice))
    move.because(f"{name} asks to leave: {reason}; {choice}")
    return f"{name}: {choice}"


def _is_earlier(instant: Instant, known: Instant | None) -> bool:
    """By more than a message may be under way: it is repeated with every heartbeat."""
    return known is None or instant < after(known, seconds(-1.0))


def _secure(move: Move, machine: Machine) -> str:
    """See to it that what the machine holds outlives it; in words."""
    if machine.name not in _machines_with_ranks(move):
        return "it has no rank and may go"
    why_not = switchover.obstacle(move, machine.name)
    if not why_not and machine.leave_by is None:
        return "its ranks move to a standby"
    moves = why_not or "its ranks move to a standby"
    if not why_not and not fitting.does_switchover_fit(move.state, machine.leave_by, move.now):
        moves = f"too late for a switchover, one took {fitting.switchover_s(move.state):.1f} s"
    return f"{moves}; {_save_now(move)}"


def _save_now(move: Move) -> str:
    keeping = move.state.kept.keeping
    if not keeping.snapshot.is_on and not keeping.checkpoint.is_on:
        return "no snapshot is taken, snapshots and checkpoints are off"
    shelf.want(move, shelf.EMERGENCY, is_another=True)
    if isinstance(move.state.phase, Training):
        shelf.ask(move)
    where = [
        "for other machines" if keeping.snapshot.is_on and keeping.snapshot.peers else "",
        "for storage" if keeping.checkpoint.is_on else "",
    ]
    places = " and ".join(place for place in where if place)
    return f"all ranks take a snapshot at the next step boundary {places}".strip()


# --------------------------------------------------------------------------- a doubtful loss


def on_alarm(move: Move, alarm: LossAlarm) -> None:
    """The loss can't be trusted any more: the last good version in memory is kept aside.

    Later checkpoints are suspect, by what their ranks say; no good one goes for them.
    """
    kept = move.state.kept
    if not kept.keeping.checkpoint.is_on or kept.is_void(alarm.version):
        return
    sound = shelf.newest_sound(move.state)
    if sound is None or (kept.durable is not None and kept.durable.version >= sound):
        move.because(f"rank {alarm.rank}: {alarm.text}; a good checkpoint is there")
        return
    shelf.keep(move, replace(kept, due=sound))
    move.because(f"rank {alarm.rank}: {alarm.text}; step {sound.step} is kept aside")


# --------------------------------------------------------------------------- operators


def on_notice(move: Move, notice: PreemptionNotice) -> None:
    """Somebody who knows says that machines are about to go."""
    unknown = [name for name in notice.machines if name not in move.state.machines]
    if unknown or not notice.machines:
        known = ", ".join(sorted(move.state.machines, key=lookup.natural_order))
        text = f"no machine is called {', '.join(unknown) or 'so'}; there are: {known}"
        _reply(move, notice.request, text, is_accepted=False)
        return
    if isinstance(move.state.phase, Ending | Ended):
        _reply(move, notice.request, "the job ends already", is_accepted=True)
        return
    said = [on_leaving(move, name, "preemption notice", notice.grace_s) for name in notice.machines]
    _reply(move, notice.request, "; ".join(said), is_accepted=True)


def on_save(move: Move, request: SaveRequest) -> None:
    """A checkpoint of the next boundary; training goes on."""
    if not move.state.kept.keeping.checkpoint.is_on:
        text = "there is no place for checkpoints; start the job with --checkpoints"
        _reply(move, request.request, text, is_accepted=False)
        return
    shelf.want(move, shelf.CHECKPOINT, is_another=True)
    if isinstance(move.state.phase, Training):
        shelf.ask(move)
    text = "a checkpoint is taken at the next step boundary; training goes on"
    _reply(move, request.request, text, is_accepted=True)


def _reply(move: Move, request: str, text: str, *, is_accepted: bool) -> None:
    reply = OperatorReply(request=request, is_accepted=is_accepted, is_final=True, text=text)
    move.reply(reply)
