"""Peers that keep this rank waiting, and the orderly end.

Decides when a peer whose data is missing counts as overdue: never thrown through autograd, always
reported as a broken channel of that rank. Silence alone proves nothing, so the peer is asked what
it does, and its I/O thread answers whatever its main thread is busy with:

- it runs its script inside a step, or does not answer: overdue after `collective_timeout_s`;
- it waits itself: whoever is nearer to the cause reports it; after twice that time both wait for
  each other and it is reported here;
- it is outside a step (saves, evaluates, runs its first step), or waits for one that is: overdue
  after `outside_step_limit_s`;
- it still builds `main`: never; its own worker bounds that.

Any byte of the peer other than these questions and answers is progress and starts anew.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainmover.communicator.channel import Channel
from trainmover.communicator.engine import Engine, Timer
from trainmover.communicator.frames import HEADER, HEADER_BYTES, FrameType
from trainmover.communicator.generation import Generation
from trainmover.communicator.incremental import Succession
from trainmover.communicator.mesh import Mesh
from trainmover.communicator.operation import Operation
from trainmover.communicator.outbox import Outbox
from trainmover.communicator.ports import OutFrame
from trainmover.communicator.settings import CommunicatorConfig, CommunicatorEvents, Place

_PERIOD_S = 0.5
_ASK_AFTER_S = 0.9
"""Silence before a peer is asked; a step's ordinary waits cost no question."""
_FRESH_S = (1.0, 10.0)
"""Least and most age of an answer that still counts; half of the limit in between."""


class _Answer(enum.IntEnum):
    """What a peer says it does."""

    INSIDE = 1
    WAITS = 2
    EXCUSED = 3
    """Waits for a rank that is outside a step or waits for one."""
    OUTSIDE = 4
    BUILDS = 5


_EXCUSES = (_Answer.EXCUSED, _Answer.OUTSIDE, _Answer.BUILDS)
_TEXTS = {
    None: "does not answer",
    _Answer.INSIDE: "runs its script inside the step",
    _Answer.WAITS: "waits for another rank itself",
    _Answer.EXCUSED: "waits for a rank that is outside a step",
    _Answer.OUTSIDE: "is outside a step",
    _Answer.BUILDS: "still builds main",
}


@dataclass(slots=True)
class _Wanted:
    """What is missing from one rank at one look."""

    what: str
    limit_s: float
    is_send: bool


@dataclass(slots=True)
class _Wait:
    """A rank that is silent while something is missing from it."""

    since: float
    progress: int
    answer: _Answer | None = None
    answered_at: float = 0.0
    is_asked: bool = False
    is_reported: bool = False


class OverdueWatch:
    """A look at whom this rank waits for, twice a second."""

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        events: CommunicatorEvents,
        succession: Succession,
        config: CommunicatorConfig,
    ) -> None:
        self.place: Callable[[], Place] = lambda: Place.INSIDE
        """Where this rank's main thread is; on the I/O thread, under the engine's lock."""
        self.awaited_ranks: Callable[[], tuple[int, ...]] = tuple
        """Ranks whose small messages the layer above waits for; called likewise."""
        self._engine = engine
        self._outbox = outbox
        self._events = events
        self._succession = succession
        self._config = config
        self._waits: dict[int, _Wait] = {}
        self._number = 0
        self._chatter: dict[str, int] = {}
        """Bytes of questions and answers by peer: no progress."""
        self._timer: Timer = engine.call_later(_PERIOD_S, self._look)
        self._is_stopped = False

    # -- looking -------------------------------------------------------------

    def _look(self) -> None:
        with self._engine.lock:
            current = self._succession.current
            if current is None or current.is_broken:
                self._waits.clear()
            else:
                self._review(current, time.monotonic())
        self._outbox.drain()
        if not self._is_stopped:
            self._timer = self._engine.call_later(_PERIOD_S, self._look)

    def _review(self, generation: Generation, now: float) -> None:
        if generation.number != self._number:
            self._waits.clear()
            self._number = generation.number
        wanted = self._wanted(generation, now)
        for rank in [rank for rank in self._waits if rank not in wanted]:
            del self._waits[rank]
        for rank, missing in wanted.items():
            channel = generation.ports[rank].channel
            progress = self._progress(channel, missing)
            wait = self._waits.get(rank)
            if wait is None or wait.progress != progress:
                self._waits[rank] = _Wait(now, progress)
                continue
            self._judge(generation, rank, missing, now)
            ask_after_s = min(_ASK_AFTER_S, missing.limit_s / 3)
            is_due = now - wait.since >= ask_after_s and not wait.is_asked
            if is_due and channel is not None and not channel.is_closed:
                wait.is_asked = True
                self._send(channel, generation.number, FrameType.ASK, 0)

    def _progress(self, channel: Channel | None, missing: _Wanted) -> int:
        if channel is None:
            return -1
        if missing.is_send:
            return channel.out.bytes_out
        return channel.bytes_in - self._chatter.get(channel.peer, 0)

    def _wanted(self, generation: Generation, now: float) -> dict[int, _Wanted]:
        """Ranks something is missing from, with the least limit that applies."""
        found: dict[int, _Wanted] = {}

        def want(rank: int, what: str, limit_s: float, is_send: bool = False) -> None:
            known = found.get(rank)
            if known is None:
                found[rank] = _Wanted(what, limit_s, is_send)
            else:
                known.limit_s = min(known.limit_s, limit_s)

        for operation in generation.outstanding():
            limit_s, what = self._limit_of(operation), self._name_of(operation)
            missing = [rank for rank, count in operation.waiting_for.items() if count > 0]
            for rank in missing:
                want(rank, what, limit_s)
            if not missing and operation.unsent:
                for rank in self._blocked(generation, operation):
                    want(rank, what, limit_s, is_send=True)
            elif not missing:
                self._judge_any(generation, operation, now)
        limit_s = self._config.collective_timeout_s
        entered = generation.gates.awaited()
        if entered is not None:
            want(entered[1], f"gate {entered[0]}", limit_s)
        for rank in self.awaited_ranks():
            if rank in generation.ports:
                want(rank, "its personal state", limit_s)
        return found

    @staticmethod
    def _blocked(generation: Generation, operation: Operation) -> list[int]:
        """Peers that don't take what this rank sends them."""
        found = []
        for rank in operation.call.group.ranks:
            port = generation.ports.get(rank)
            if port is not None and port.channel is not None and not port.channel.out.is_drained:
                found.append(rank)
        return found

    def _limit_of(self, operation: Operation) -> float:
        call = operation.call
        own_s = call.group.timeout_s if call.timeout_s is None else call.timeout_s
        return min(own_s, self._config.collective_timeout_s) if own_s > 0 else float("inf")

    @staticmethod
    def _name_of(operation: Operation) -> str:
        call = operation.call
        kind = call.kind.name.lower()
        return f"{kind} number {operation.sequence} of group {call.group.name!r}"

    # -- judging -------------------------------------------------------------

    def _judge(self, generation: Generation, rank: int, missing: _Wanted, now: float) -> None:
        wait = self._waits[rank]
        answer = wait.answer
        fresh_s = min(max(_FRESH_S[0], missing.limit_s / 2), _FRESH_S[1])
        # An excuse needs no repetition: a stopped process is its agent's to see, a cut cable the
        # kernel's; a script that holds the interpreter for long while it saves is neither.
        if answer not in _EXCUSES and now - wait.answered_at > fresh_s:
            answer = None
        patience_s = missing.limit_s
        if answer is _Answer.WAITS:
            patience_s = 2 * missing.limit_s
        elif answer is _Answer.BUILDS:
            patience_s = float("inf")
        elif answer in _EXCUSES:
            patience_s = max(self._config.outside_step_limit_s, missing.limit_s)
        silent_s = now - wait.since
        channel = generation.ports[rank].channel
        is_unasked = answer is None and channel is not None and not wait.is_asked
        if wait.is_reported or silent_s < patience_s or is_unasked:
            return
        wait.is_reported = True
        reason = f"no data for {silent_s:.0f} s in {missing.what}: rank {rank} {_TEXTS[answer]}"
        if answer is None and channel is not None:
            channel.fail(reason)  # useless for a reconnection, too
        else:
            self._report(generation, rank, reason)

    def _judge_any(self, generation: Generation, operation: Operation, now: float) -> None:
        """A receive from anybody: nobody in particular is asked, the group's own limit counts."""
        call = operation.call
        limit_s = call.group.timeout_s if call.timeout_s is None else call.timeout_s
        if operation.is_overdue or limit_s <= 0 or now - operation.started_at < limit_s:
            return
        operation.is_overdue = True
        others = [rank for rank in call.group.ranks if rank != generation.rank]
        if others:
            reason = f"no data for {limit_s:g} s in {self._name_of(operation)}"
            self._report(generation, others[0], reason)

    def _report(self, generation: Generation, rank: int, reason: str) -> None:
        peer, number = generation.membership.members[rank].incarnation, generation.number
        self._outbox.event(lambda: self._events.channel_broken(number, peer, reason))

    # -- questions and answers -----------------------------------------------

    @staticmethod
    def _send(channel: Channel, number: int, type_: FrameType, slot: int) -> None:
        channel.send(OutFrame(HEADER.pack(type_, 0, 0, slot, number, 0, 0, 0, 0, 0), b"", number))

    def heard(self, channel: Channel, generation: Generation, type_: int, slot: int) -> None:
        """A question or an answer has arrived."""
        self._chatter[channel.peer] = self._chatter.get(channel.peer, 0) + HEADER_BYTES
        if type_ == FrameType.ASK:
            if generation is self._succession.current and not generation.is_broken:
                answer = self._own_answer(generation)
                self._send(channel, generation.number, FrameType.ANSWER, answer)
            return
        rank = generation.rank_by_incarnation.get(channel.peer, -1)
        wait = self._waits.get(rank)
        if wait is not None and generation.number == self._number:
            known = slot in _Answer.__members__.values()
            wait.answer = _Answer(slot) if known else None
            wait.answered_at, wait.is_asked = time.monotonic(), False

    def _own_answer(self, generation: Generation) -> _Answer:
        place = self.place()
        if place is Place.BUILDING:
            return _Answer.BUILDS
        if place is Place.OUTSIDE:
            return _Answer.OUTSIDE
        is_waiting = place is Place.AT_GATE or any(
            operation.waiting or operation.unsent for operation in generation.outstanding()
        )
        if not is_waiting:
            return _Answer.INSIDE
        waits = self._waits.values()
        is_excused = bool(waits) and all(wait.answer in _EXCUSES for wait in waits)
        return _Answer.EXCUSED if is_excused else _Answer.WAITS

    # -- the end -------------------------------------------------------------

    def stop(self, mesh: Mesh, timeout_s: float) -> None:
        """Let queued frames leave, then close the mesh; any thread."""
        self._is_stopped = True
        self._timer.cancel()
        deadline = time.monotonic() + timeout_s
        done = threading.Event()

        def end() -> None:
            with self._engine.lock:
                is_drained = all(channel.out.is_drained for channel in mesh.channels.values())
                if is_drained or time.monotonic() >= deadline:
                    mesh.close()
                    done.set()
                    return
            self._engine.call_later(0.005, end)

        if self._engine.on_thread():
            with self._engine.lock:
                mesh.close()
            return
        self._engine.submit(end)
        done.wait(timeout_s + 1.0)
