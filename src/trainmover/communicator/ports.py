"""Matching of messages to posted receives, per generation and peer.

A port belongs to one (generation, rank) and outlives its channel's absence: sends made before
the channel exists wait here, data that arrives before its collective is called is kept here.
Decides what matches what and what is a mismatch; owns no socket.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from trainmover.communicator.frames import HEADER, TRAILER_OK, FrameType, Header
from trainmover.communicator.operation import Key, Operation, Receive

if TYPE_CHECKING:
    from trainmover.communicator.channel import Channel
    from trainmover.communicator.generation import Generation


class OutFrame:
    """One frame on its way out."""

    __slots__ = (
        "parts",
        "left",
        "header",
        "payload",
        "operation",
        "generation",
        "is_data",
        "is_for_ring",
        "is_staged",
        "is_started",
    )

    def __init__(
        self,
        header: bytes,
        payload: memoryview | bytes,
        generation: int,
        operation: Operation | None = None,
        is_data: bool = False,
    ) -> None:
        self.header = header
        self.payload = payload
        self.generation = generation
        self.operation = operation
        self.is_data = is_data
        self.is_for_ring = False
        """The payload goes through shared memory once it is this frame's turn."""
        self.is_started = False
        """Some of its bytes are on the wire: it has to be completed."""
        self.is_staged = False
        """It lies there: the header must go out even if nobody wants the payload any more."""
        self.parts: list[memoryview | bytes] = [header]
        if len(payload):
            self.parts.append(payload)
        if is_data:
            self.parts.append(TRAILER_OK)
        self.left = len(header) + len(payload) + (1 if is_data else 0)


class Port:
    """This rank's end towards one rank of one generation."""

    __slots__ = (
        "generation",
        "rank",
        "peer",
        "channel",
        "posted",
        "unexpected",
        "backlog",
        "is_dead",
    )

    def __init__(self, generation: Generation, rank: int, peer: str) -> None:
        self.generation = generation
        self.rank = rank
        self.peer = peer
        self.channel: Channel | None = None
        self.posted: dict[Key, Receive] = {}
        self.unexpected: dict[Key, tuple[int, torch.Tensor | bytearray]] = {}
        self.backlog: deque[OutFrame] = deque()
        self.is_dead = False
        """Its channel broke: within this generation there is no other."""

    # -- out -----------------------------------------------------------------

    def send(self, operation: Operation, slot: int, view: memoryview) -> None:
        """Queue one message of a collective or a send."""
        header = HEADER.pack(
            FrameType.DATA,
            0,
            0,
            slot,
            self.generation.number,
            operation.call.group.id,
            operation.sequence,
            len(view),
            operation.tag,
            operation.call.check,
        )
        self.put(OutFrame(header, view, self.generation.number, operation, True))

    def put(self, frame: OutFrame) -> None:
        """Queue any frame; waits here until there is a channel."""
        if self.channel is not None:
            self.channel.send(frame)
            return
        if self.is_dead:
            if frame.operation is not None:
                frame.operation.left()
            return
        self.backlog.append(frame)
        self.generation.want(self)

    def attach(self, channel: Channel) -> None:
        """The channel is open: everything that waited for it goes out, in order."""
        self.channel = channel
        while self.backlog:
            channel.send(self.backlog.popleft())

    # -- in ------------------------------------------------------------------

    def post(self, key: Key, receive: Receive) -> None:
        """Expect one message; it may have arrived already."""
        early = self.unexpected.pop(key, None)
        if early is None:
            self.posted[key] = receive
            if self.channel is None and not self.is_dead:
                self.generation.want(self)
            return
        check, payload = early
        if self.channel is not None:
            self.channel.unexpected_taken(len(payload))
        if self._is_mismatch(receive, check, len(payload)):
            return
        if isinstance(payload, torch.Tensor):
            receive.take_tensor(payload)
        else:
            receive.take(payload)

    def match(self, header: Header) -> Receive | None:
        """The posted receive of an arriving message, taken from the table."""
        key = (header.group, header.tag, header.sequence, header.slot)
        receive = self.posted.pop(key, None)
        is_open = receive is None and bool(header.tag) and bool(self.generation.any_source)
        if is_open and self.generation.claim(self, header):
            receive = self.posted.pop(key, None)
        if receive is None:
            self._look_for_mismatch(header)
            return None
        if self._is_mismatch(receive, header.check, header.length):
            return None
        return receive

    def keep(self, header: Header, payload: torch.Tensor | bytearray) -> None:
        """A complete message that nobody has asked for yet."""
        receive = self.match(header)
        if receive is not None:
            if isinstance(payload, torch.Tensor):
                receive.take_tensor(payload)
            else:
                receive.take(payload)
            return
        key = (header.group, header.tag, header.sequence, header.slot)
        self.unexpected[key] = (header.check, payload)
        self.generation.note_call(header, self)
        if self.channel is not None:
            self.channel.unexpected_kept(len(payload))

    def _is_mismatch(self, receive: Receive, check: int, length: int) -> bool:
        operation = receive.operation
        if operation.is_finished or (operation.call.check == check and receive.nbytes == length):
            return False
        self.generation.report_mismatch(operation, self, check)
        return True

    def _look_for_mismatch(self, header: Header) -> None:
        operation = self.generation.active.get((header.group, header.tag, header.sequence))
        if operation is not None and operation.call.check != header.check and not header.tag:
            self.generation.report_mismatch(operation, self, header.check)

    def clear(self) -> None:
        """Forget everything; the generation is over."""
        self.posted.clear()
        self.backlog.clear()
        if self.channel is not None:
            for _, payload in self.unexpected.values():
                self.channel.unexpected_taken(len(payload))
        self.unexpected.clear()
