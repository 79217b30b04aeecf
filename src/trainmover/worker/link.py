"""Control path from a worker to its machine's agent: a unix socket on the I/O thread.

The agent may die and come back: the link reconnects to the same path for as long as the process
lives; the lifecycle bounds how long it waits for answers and sends again what is unanswered.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from trainmover.communicator.engine import Engine
from trainmover.errors import RemoteProtocolError
from trainmover.protocol import codec
from trainmover.protocol.messages import Message, ToWorkerBody
from trainmover.protocol.nursery import FrameBuffer, WorkerHello, frame
from trainmover.worker.tally import Tally

RETRY_S = 0.05
RETRY_MAX_S = 0.5
BACKLOG_FRAMES = 4096
"""Told messages (logs, findings) kept while the agent is away; older ones are dropped first."""


class AgentLink:
    """Frames to and from the agent. All methods on the I/O thread (or in its place, see
    `Engine.try_turn`), `tell` on any."""

    def __init__(self, engine: Engine, path: str, incarnation: str) -> None:
        self._engine = engine
        self._path = path
        self._incarnation = incarnation
        self._socket: socket.socket | None = None
        self._buffer = FrameBuffer()
        self._out = bytearray()
        self._wants_write = False
        self._backlog: list[bytes] = []
        self._retry_s = RETRY_S
        self._is_closed = False
        self.tally = Tally()
        self.on_message: Callable[[ToWorkerBody], None]
        self.on_up: Callable[[], None]
        self.on_down: Callable[[], None]
        engine.at_fork_in_child.append(self._become_child)

    def connect(self) -> None:
        """Try now; retries by itself until `close`."""
        if self._is_closed or self._socket is not None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # a stopped agent lets nobody in, and collectives go on here
        try:
            sock.connect(self._path)
        except OSError:
            sock.close()
            self._engine.call_later(self._retry_s, self.connect)
            self._retry_s = min(self._retry_s * 2, RETRY_MAX_S)
            return
        self._retry_s = RETRY_S
        self._socket = sock
        self._buffer = FrameBuffer()
        self._out = bytearray(frame(WorkerHello(incarnation=self._incarnation, pid=os.getpid())))
        for data in self._backlog:
            self._out += data
        self._backlog = []
        self._wants_write = False
        self._engine.watch(sock.fileno(), self._readable, self._flush)
        self._flush()
        self.on_up()

    def send(self, message: Message) -> None:
        """Send now; dropped while the link is down (the lifecycle sends again)."""
        message = self.tally.sent(message)
        if self._socket is not None:
            self._out += frame(message)
            self._flush()

    def tell(self, message: Message) -> None:
        """Like `send`, but kept while the link is down. Any thread."""
        if self._engine.on_thread():
            self._tell(message)
        elif self._engine.try_turn():  # cheaper than to wake the I/O thread for it
            try:
                self._tell(message)
            finally:
                self._engine.end_turn()
        else:
            self._engine.submit(lambda: self._tell(message))

    def _tell(self, message: Message) -> None:
        if self._socket is None:
            self._backlog.append(frame(message))
            del self._backlog[:-BACKLOG_FRAMES]
            return
        self.send(message)

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._out:
                sent = self._socket.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._lost()
            return
        if self._wants_write != bool(self._out):
            self._wants_write = bool(self._out)
            self._engine.modify(self._socket.fileno(), self._wants_write)

    def _readable(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        try:
            for body in self._buffer.feed(data):
                message = codec.decode_to_worker(body)
                self.tally.received(message)
                self.on_message(message)
        except RemoteProtocolError:
            self._lost()

    def _lost(self) -> None:
        if self._socket is None:
            return
        self._engine.unwatch(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._engine.submit(self.on_down)  # this may be the thread that told something
        self._engine.call_later(self._retry_s, self.connect)

    def _become_child(self) -> None:
        """A loader worker must not keep the agent from seeing this process's end."""
        self._is_closed = True
        if self._socket is not None:
            self._socket.close()

    def close(self) -> None:
        """Flush what is possible and stop reconnecting."""
        self._is_closed = True
        if self._socket is None:
            return
        self._socket.setblocking(True)
        self._socket.settimeout(1.0)
        try:
            self._socket.sendall(bytes(self._out))
        except OSError:
            # The agent is gone; nobody is left to tell.
            self._out.clear()
        self._engine.unwatch(self._socket.fileno())
        self._socket.close()
        self._socket = None
