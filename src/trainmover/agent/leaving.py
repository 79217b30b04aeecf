"""How an agent leaves: asked to, in a hurry where the machine is taken away, or ordered to end.

Decides how long it waits for its ranks to be moved elsewhere. A notice that is repeated (schedulers
send several signals) never shortens that; a person who asks twice ends the agent at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, assert_never

from trainmover.agent import workers
from trainmover.agent.move import Move
from trainmover.agent.state import (
    Ended,
    Ending,
    Leaving,
    Registering,
    Serving,
    StopAsked,
    ToWorkerLink,
)
from trainmover.protocol import exits
from trainmover.protocol.messages import AgentLeaving, StopNow
from trainmover.units import Instant, in_seconds

RESERVE_SHARE: Final = 0.2
MOST_RESERVE_S: Final = 3.0
"""Of a machine's last seconds: for the end of its processes."""


def on_stop_asked(move: Move, asked: StopAsked) -> None:
    """Leave; the job goes on elsewhere if it can."""
    match move.state.phase:
        case Serving(spec=spec):
            phase = Leaving(
                spec=spec,
                reason=asked.reason,
                deadline=_deadline(move, asked),
                is_hurried=asked.grace_s > 0,
            )
            move.enter(phase)
            move.tell(news(move, phase))
            move.because(f"asked to leave: {asked.reason}")
        case Leaving() as phase if asked.is_notice:
            if asked.grace_s > 0:
                deadline = min(phase.deadline, _deadline(move, asked))
                move.enter(replace(phase, deadline=deadline, is_hurried=True))
            move.because(f"leaving already: {asked.reason}")
        case Registering() | Leaving():
            grace_s = move.state.config.kill_grace_s
            end(move, exits.INTERRUPTED, asked.reason, grace_s=grace_s)
        case Ending() if asked.is_notice:
            move.because(f"ending already: {asked.reason}")
        case Ending():
            kill_and_end(move)
        case Ended():
            pass
        case _ as never:
            assert_never(never)


def _deadline(move: Move, asked: StopAsked) -> Instant:
    limit_s = move.state.config.leave_timeout_s
    if asked.grace_s > 0:
        usable_s = asked.grace_s - min(MOST_RESERVE_S, RESERVE_SHARE * asked.grace_s)
        limit_s = min(limit_s, usable_s)
    return move.in_(limit_s)


def news(move: Move, phase: Leaving) -> AgentLeaving:
    """What the controller hears of it, now and with every heartbeat."""
    left_s = max(0.001, in_seconds(phase.deadline - move.now)) if phase.is_hurried else 0.0
    return AgentLeaving(machine=move.state.machine, reason=phase.reason, grace_s=left_s)


def end(move: Move, code: int, reason: str, *, grace_s: float) -> None:
    """Workers may end by themselves for `grace_s`, then they are killed; the first reason stays."""
    if isinstance(move.state.phase, Ending):
        return
    move.enter(Ending(code=code, reason=reason, deadline=move.in_(grace_s)))
    for name in sorted(move.state.workers):
        stop = StopNow(term=move.state.term, code=code, reason=reason)
        move.do(ToWorkerLink(incarnation=name, body=stop))
    move.because(f"end with {code}: {reason}")


def kill_and_end(move: Move) -> None:
    """Kill what is left, and go a little later, whatever its end looks like."""
    phase = move.state.phase
    if isinstance(phase, Ending) and not phase.is_killing:
        deadline = move.in_(2 * move.state.config.kill_grace_s)
        move.enter(replace(phase, is_killing=True, deadline=deadline))
        workers.kill_all(move)
