"""What one switchover cost this worker while it could not train: messages and channel frames.

Decides what belongs to the critical path of a stayer: from its first word that it has stopped
(at the boundary of a planned move, broken or frozen after a loss) to the commit. A message that is
sent again counts once, and once more as repeated. Who is first must not change a count: the plan is
in it, even where others stop before this worker does and the plan comes in front of its stop;
`Broken` is not, which nobody says whom the order to freeze reaches first. Frames of POISON leave
before the first word and are not in it either: one on each channel.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trainmover.communicator.counters import Counters
from trainmover.protocol.messages import (
    AtBoundary,
    Broken,
    Commit,
    Done,
    FirstGate,
    Freeze,
    Lost,
    Message,
    PlanIssued,
    Report,
    Traffic,
)

SENT = (AtBoundary, Report, Done, Lost)
RECEIVED = (Freeze, PlanIssued, Commit)


class Tally:
    """Counts between stop and commit. All methods on the I/O thread."""

    def __init__(self) -> None:
        self.read_counters: Callable[[], Counters] | None = None
        self._is_open = False
        self._before: Counters | None = None
        self._sent: dict[tuple[str, int], int] = {}
        self._received: dict[tuple[str, int], int] = {}
        self._early: dict[tuple[str, int], int] = {}
        """Plans that came in front of the stop."""
        self._generation = -1
        self._found: Traffic | None = None

    def sent(self, message: Message) -> Message:
        """Note a message; the first gate's carries what was counted."""
        if isinstance(message, Broken):
            self._open()
        elif isinstance(message, SENT):
            self._open()
            _count(self._sent, message)
        elif isinstance(message, FirstGate):
            if self._is_open and message.generation > self._generation:
                # A peer's frame has told the commit (C8): it counts as the one that is under way.
                self.received(Commit(term=0, number=message.generation))
            if message.generation == self._generation:
                return msgspec.structs.replace(message, traffic=self._found)
        return message

    def received(self, message: Message) -> None:
        """Note an order; a commit is the end."""
        if not isinstance(message, RECEIVED) or _number(message) <= self._generation:
            return
        if isinstance(message, Freeze):
            self._open()
        if self._is_open:
            _count(self._received, message)
        elif isinstance(message, PlanIssued):
            _count(self._early, message)
        if isinstance(message, Commit):
            if self._is_open:
                self._close(message.number)
            self._early.clear()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._sent.clear()
            self._received.clear()
            self._before = self.read_counters() if self.read_counters is not None else None

    def _close(self, generation: int) -> None:
        self._is_open = False
        self._generation = generation
        plan = (PlanIssued.__name__, generation)
        if early := self._early.get(plan):
            self._received[plan] = self._received.get(plan, 0) + early
        frames = amount = 0
        if self.read_counters is not None and self._before is not None:
            now = self.read_counters()
            frames = now.messages_sent - self._before.messages_sent
            amount = now.bytes_sent - self._before.bytes_sent
        counts = (*self._sent.values(), *self._received.values())
        self._found = Traffic(
            messages_sent=len(self._sent),
            messages_received=len(self._received),
            messages_repeated=sum(counts) - len(counts),
            frames_sent=frames,
            bytes_sent=amount,
        )


def _count(found: dict[tuple[str, int], int], message: Message) -> None:
    key = (type(message).__name__, _number(message))
    found[key] = found.get(key, 0) + 1


def _number(message: Message) -> int:
    match message:
        case PlanIssued(plan=plan):
            return plan.number
        case Broken(generation=generation):
            return generation
        case _:
            return int(getattr(message, "number", 0))
