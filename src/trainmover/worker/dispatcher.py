"""Feeds the lifecycle its events, one at a time, and carries out what it orders.

Decides on which thread an event is handled. Everything is handled on the I/O thread, so that the
lifecycle needs no lock, with one exception: the training thread makes the ordinary moves of a step
itself (run it, contribute to its gate) when the I/O thread has nothing to do. Two threads taking
turns twice per step would cost more than all the rest of a step's bookkeeping together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from trainmover.communicator.engine import Engine, Timer
from trainmover.units import Instant
from trainmover.worker import events, lifecycle
from trainmover.worker.tracing import trace

LEAST_DELAY_S: Final = 0.001


def is_ordinary(command: events.AnyCommand) -> bool:
    """Whether any thread may carry it out: it neither talks to the agent nor changes channels."""
    match command:
        case events.Proceed():
            return True
        case events.ContributeGate():
            return not command.flags[0]
        case _:
            return False


class Dispatcher:
    """One worker's lifecycle, its clock and its hands."""

    def __init__(
        self,
        engine: Engine,
        state: lifecycle.WorkerState,
        execute: Callable[[events.AnyCommand], None],
        *,
        does_trace: bool,
    ) -> None:
        self.state = state
        self._engine = engine
        self._execute = execute
        self._does_trace = does_trace
        self._events: deque[Any] = deque()
        self._is_dispatching = False
        self._tick: Timer | None = None
        self._tick_at = Instant(0)

    def dispatch(self, event: Any) -> None:
        """On the I/O thread. An event that arises while a command is carried out waits its turn."""
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            while self._events:
                event = self._events.popleft()
                self._carry_out(event, self._moved_by(event))
        finally:
            self._is_dispatching = False
        self._schedule()

    def dispatch_here(self, event: Any, is_void: Callable[[], bool]) -> bool:
        """On the training thread: handle `event` at once if that is an ordinary move.

        False: nothing has happened; the event has to go to the I/O thread. The lifecycle is pure,
        so a move that turns out to be another one is simply not made.
        """
        if not self._engine.try_turn():
            return False
        try:
            if is_void() or self._events:
                return False
            move = self._moved_by(event)
            if not all(map(is_ordinary, move.commands)):
                return False
            self._carry_out(event, move)
            self._schedule()
        except BaseException as error:
            self._engine.on_fatal(error)
        finally:
            self._engine.end_turn()
        return True

    def _moved_by(self, event: Any) -> lifecycle.Transition:
        return lifecycle.transition(self.state, event, Instant(time.monotonic_ns()))

    def _carry_out(self, event: Any, move: lifecycle.Transition) -> None:
        self.state = move.state
        if self._does_trace:
            trace(event, move)
        for command in move.commands:
            self._execute(command)

    def _schedule(self) -> None:
        """One timer, moved only when a deadline comes nearer; an early tick changes nothing."""
        deadline = lifecycle.next_deadline(self.state)
        if deadline is None or (self._tick is not None and self._tick_at <= deadline):
            return
        if self._tick is not None:
            self._tick.cancel()
        self._tick_at = deadline
        delay_s = max(LEAST_DELAY_S, (deadline - time.monotonic_ns()) / 1e9)
        self._tick = self._engine.call_later(delay_s, self._ticked)

    def _ticked(self) -> None:
        self._tick = None
        self.dispatch(events.Tick())
