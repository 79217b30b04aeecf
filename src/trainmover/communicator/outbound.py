"""The sending half of a channel: a queue of frames and the socket they leave by.

Decides what goes into one system call, what waits for ring space, and how a frame that is
half sent ends when its generation breaks. Under the engine's lock, on any thread.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Callable

from trainmover.communicator.engine import Engine
from trainmover.communicator.frames import (
    FLAG_IN_RING,
    HEADER,
    HEADER_BYTES,
    TRAILER_OK,
    TRAILER_POISON,
)
from trainmover.communicator.ports import OutFrame
from trainmover.communicator.settings import CommunicatorConfig
from trainmover.communicator.shared_memory import RingPair

_FRAMES_PER_CALL = 8


class Outbound:
    """Frames on their way out of one channel."""

    def __init__(
        self,
        engine: Engine,
        sock: socket.socket,
        config: CommunicatorConfig,
        fail: Callable[[str], None],
        drain: Callable[[], None],
    ) -> None:
        self.ring: RingPair | None = None
        self.bytes_out = 0
        self.frames_out = 0
        self.is_blocked = False
        self.is_paused = False
        """Reading is paused (kept here because one call sets both interests of the socket)."""
        self.is_closed = False
        self._engine = engine
        self._config = config
        self._socket = sock
        self._fd = sock.fileno()
        self._fail = fail
        self._drain = drain
        self._queue: deque[OutFrame] = deque()
        self._is_flush_due = False

    @property
    def is_drained(self) -> bool:
        """Nothing is waiting to be sent."""
        return not self._queue

    def send(self, frame: OutFrame) -> None:
        """Queue a frame. Small ones, and those of a call whose caller is about to wait, leave at
        once where the socket takes them.
        """
        if self.is_closed:
            if frame.operation is not None:
                frame.operation.left()
            return
        if frame.is_data and self.ring is not None:
            self._into_ring(frame)
        self._queue.append(frame)
        if self.is_blocked or self._is_flush_due:
            return
        operation = frame.operation
        is_awaited = operation is not None and operation.call.is_awaited
        if is_awaited or len(frame.payload) <= self._config.eager_bytes:
            self.flush()
        else:
            self._is_flush_due = True
            self._engine.soon(self._flush_soon)

    def _into_ring(self, frame: OutFrame) -> None:
        """Large payloads wait for ring space at the moment they are sent, in queue order."""
        if len(frame.payload) >= self._config.shared_memory_min_bytes:
            frame.is_for_ring = True

    def _flush_soon(self) -> None:
        with self._engine.lock:
            self._is_flush_due = False
            if not self.is_closed:
                self.flush()
        self._drain()

    def on_writable(self) -> None:
        """The socket takes data again; no lock held."""
        with self._engine.lock:
            if not self.is_closed:
                self.is_blocked = False
                self.flush()
                if not self.is_blocked and not self.is_closed:
                    self._engine.modify(self._fd, False, not self.is_paused)
        self._drain()

    def flush(self) -> None:
        """Send as much of the queue as the socket takes."""
        while self._queue:
            parts: list[memoryview | bytes] = []
            for frame in itertools.islice(self._queue, _FRAMES_PER_CALL):
                if frame.is_for_ring and not self._stage(frame):
                    break
                parts.extend(frame.parts)
            if not parts:
                return  # the ring is full; the peer's ROOM frame goes on
            try:
                sent = self._socket.sendmsg(parts)
            except BlockingIOError:
                self.is_blocked = True
                self._engine.modify(self._fd, True, not self.is_paused)
                return
            except OSError as error:
                self._fail(f"send failed: {error.strerror or error}")
                return
            self.bytes_out += sent
            self._consume(sent)

    def _stage(self, frame: OutFrame) -> bool:
        """Copy a payload into the ring; False where there is no space yet."""
        assert self.ring is not None
        if not self.ring.put(frame.payload):
            return False
        frame.is_for_ring = False
        frame.is_staged = True
        size = len(frame.payload)
        fields = list(HEADER.unpack(frame.header))
        fields[1] |= FLAG_IN_RING
        frame.header = HEADER.pack(*fields)
        frame.payload = b""
        frame.parts = [frame.header, TRAILER_OK]
        frame.left = HEADER_BYTES + 1
        self.bytes_out += size
        operation, frame.operation = frame.operation, None
        if operation is not None:
            operation.left()
        return True

    def room(self, credit: int) -> None:
        """The peer freed ring space."""
        if self.ring is not None:
            self.ring.credit(credit)
        if not self.is_blocked:
            self.flush()

    def _consume(self, sent: int) -> None:
        while sent:
            frame = self._queue[0]
            if sent < frame.left:
                frame.left -= sent
                frame.is_started = True
                frame.parts = _without(frame.parts, sent)
                return
            sent -= frame.left
            self._queue.popleft()
            self.frames_out += 1
            if frame.operation is not None:
                frame.operation.left()

    def send_first(self, frame: OutFrame) -> None:
        """Ahead of frames that wait for ring space: the peer may wait for this one."""
        is_partial = bool(self._queue) and self._queue[0].is_started
        self._queue.insert(1 if is_partial else 0, frame)
        if not self.is_blocked:
            self.flush()

    def cut(self, generation: int) -> None:
        """Send no more data of `generation`; a frame half sent ends with POISON.

        The rest of that one frame is copied: the works' memory is free from now on.
        """
        kept: deque[OutFrame] = deque()
        for frame in self._queue:
            if not frame.is_data or frame.generation != generation:
                kept.append(frame)
                continue
            if frame.is_started or frame.is_staged:  # what lies in the ring must be announced
                _poison(frame)
                kept.append(frame)
            frame.operation = None
        self._queue = kept

    def close(self) -> None:
        """Forget what is queued: its works end by the break that follows."""
        self.is_closed = True
        for frame in self._queue:
            frame.operation = None
        self._queue.clear()


def _without(parts: list[memoryview | bytes], sent: int) -> list[memoryview | bytes]:
    rest: list[memoryview | bytes] = []
    for part in parts:
        if sent >= len(part):
            sent -= len(part)
            continue
        rest.append(memoryview(part)[sent:] if sent else part)
        sent = 0
    return rest


def _poison(frame: OutFrame) -> None:
    """Turn a half-sent frame into one that nobody takes, without the user's memory."""
    private = [bytes(part) for part in frame.parts]
    private[-1] = TRAILER_POISON
    frame.parts = list(private)
    frame.payload = b""
    frame.operation = None
