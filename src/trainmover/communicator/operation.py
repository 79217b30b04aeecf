"""One collective under way: a program that waits for arrivals, and what it owes to whom.

Decides when a work is complete: its program has ended and every byte it sent has left the
user's memory. Knows nothing of algorithms (collectives.py) and nothing of sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch

from trainmover.communicator.memory import write_back

if TYPE_CHECKING:
    from trainmover.communicator.call import Call
    from trainmover.communicator.generation import Generation
    from trainmover.communicator.outbox import Outbox
    from trainmover.communicator.ports import Port
    from trainmover.communicator.reductions import Combine

Program = Generator[None, None, None]
"""Yields to wait until everything it has asked to receive has arrived."""

Key = tuple[int, int, int, int]
"""(group, tag, sequence, slot): one message between two ranks of one generation."""


class Fold:
    """Combines an arriving piece into a target; operands in rank order (reductions.py)."""

    __slots__ = ("own", "out", "combine", "is_incoming_lower")

    def __init__(
        self, own: torch.Tensor, out: torch.Tensor, combine: Combine, is_incoming_lower: bool
    ) -> None:
        self.own = own
        self.out = out
        self.combine = combine
        self.is_incoming_lower = is_incoming_lower

    def __call__(self, raw: torch.Tensor) -> None:
        incoming = raw.view(self.own.dtype)
        if self.is_incoming_lower:
            self.combine(incoming, self.own, out=self.out)
        else:
            self.combine(self.own, incoming, out=self.out)


class Receive:
    """A posted receive: where one message goes, and what follows."""

    __slots__ = ("operation", "nbytes", "view", "fold", "then")

    def __init__(
        self,
        operation: Operation,
        nbytes: int,
        view: memoryview | None,
        fold: Fold | None,
        then: Callable[[], None] | None,
    ) -> None:
        self.operation = operation
        self.nbytes = nbytes
        self.view = view
        self.fold = fold
        self.then = then

    def take(self, payload: memoryview | bytearray) -> None:
        """The complete message, in memory that is about to be reused."""
        if self.operation.is_finished:
            return
        if self.view is not None:
            self.view[:] = payload
        elif self.fold is not None and self.nbytes:
            self.fold(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.landed()

    def take_tensor(self, raw: torch.Tensor) -> None:
        """The complete message as an aligned uint8 tensor that is about to be reused."""
        if self.operation.is_finished:
            return
        if self.fold is not None:
            self.fold(raw)
        elif self.view is not None:
            torch.frombuffer(self.view, dtype=torch.uint8).copy_(raw)
        self.landed()

    def landed(self) -> None:
        """The message is where it belongs."""
        operation = self.operation
        if operation.is_finished:
            return
        operation.touch()
        if self.then is not None:
            self.then()
        operation.arrived()


class Operation:
    """A collective of one rank in one generation."""

    __slots__ = (
        "call",
        "generation",
        "outbox",
        "sequence",
        "tag",
        "future",
        "program",
        "waiting",
        "unsent",
        "is_running",
        "is_ended",
        "is_finished",
        "has_touched",
        "is_private",
        "is_overdue",
        "keep",
        "started_at",
        "stand_ins",
        "waiting_for",
        "source",
        "on_finished",
    )

    def __init__(
        self, call: Call, generation: Generation, outbox: Outbox, sequence: int, tag: int
    ) -> None:
        self.call = call
        self.generation = generation
        self.outbox = outbox
        self.sequence = sequence
        self.tag = tag
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.program: Program | None = None
        self.waiting = 0
        self.unsent = 0
        self.is_running = False
        self.is_ended = False
        self.is_finished = False
        self.has_touched = False
        """Part of the result is already in the user's memory: after a break it is torn."""
        self.is_private = False
        """The program still works in memory of its own; nothing can be torn."""
        self.is_overdue = False
        self.keep: list[torch.Tensor] = []
        self.started_at = time.monotonic()
        self.stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(user's tensor, dense stand-in) to copy back on completion."""
        self.waiting_for: dict[int, int] = {}
        """Open receives by global rank of the peer: whom to suspect."""
        self.source = -1
        self.on_finished: Callable[[Operation], None] | None = None

    # -- what programs call --------------------------------------------------

    def send(self, peer: int, slot: int, view: memoryview) -> None:
        """Send `view` to group rank `peer`; the memory must stay as it is until it has left."""
        self.unsent += 1
        self._port(peer).send(self, slot, view)

    def receive(
        self,
        peer: int,
        slot: int,
        view: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Receive into `view` from group rank `peer`."""
        self._post(peer, slot, Receive(self, len(view), view, None, then))

    def receive_folded(self, peer: int, slot: int, fold: Fold) -> None:
        """Receive from group rank `peer` and combine at once."""
        self._post(peer, slot, Receive(self, fold.own.nbytes, None, fold, None))

    def _post(self, peer: int, slot: int, receive: Receive) -> None:
        self.waiting += 1
        port = self._port(peer)
        self.waiting_for[port.rank] = self.waiting_for.get(port.rank, 0) + 1
        inner = receive.then

        def arrived_from() -> None:
            self.waiting_for[port.rank] -= 1
            if inner is not None:
                inner()

        receive.then = arrived_from
        port.post((self.call.group.id, self.tag, self.sequence, slot), receive)

    def _port(self, peer: int) -> Port:
        return self.generation.port(self.call.group.ranks[peer])

    def touch(self) -> None:
        """The result's memory is about to change."""
        if not self.is_private:
            self.has_touched = True

    # -- progress ------------------------------------------------------------

    def run(self, program: Program) -> None:
        """Start; returns when the program waits or has ended."""
        self.program = program
        self._advance()

    def arrived(self) -> None:
        """One posted receive is complete."""
        self.waiting -= 1
        if self.waiting == 0 and not self.is_running:
            self._advance()

    def left(self) -> None:
        """One sent message has left the user's memory."""
        self.unsent -= 1
        if self.is_ended and self.unsent == 0:
            self._finish()

    def _advance(self) -> None:
        self.is_running = True
        while self.waiting == 0 and not self.is_ended and not self.is_finished:
            assert self.program is not None
            try:
                next(self.program)
            except StopIteration:
                self.is_ended = True
        self.is_running = False
        if self.is_ended and self.unsent == 0:
            self._finish()

    def _finish(self) -> None:
        if self.is_finished:
            return
        for target, source in self.stand_ins:
            write_back(target, source)
        self._complete()

    def _complete(self) -> None:
        self.is_finished = True
        self.generation.retire(self)
        self.keep.clear()
        self.stand_ins.clear()
        self.outbox.complete(self.future, self.call.result)
        if self.on_finished is not None:
            self.on_finished(self)

    def cut(self, answer: Callable[[Call, bool], None]) -> None:
        """End at once with a local answer; nothing arriving later changes user memory."""
        if self.is_finished:
            return
        if self.is_ended:  # only bytes to peers are missing: the result is the true one
            self._finish()
            return
        self.is_finished = True
        if self.program is not None and not self.is_running:
            self.program.close()
        answer(self.call, self.has_touched)
        self._complete()
