"""One authenticated stream between two incarnations, carrying every group's frames.

Decides how bytes become frames and back: many small frames in one system call, large payloads
from and into tensor memory without a copy. Owns its socket, no protocol: what a frame means is
decided by its owner. Every method is called under the engine's lock; reading happens on the
I/O thread only, sending on any.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from typing import Protocol

import torch

from trainmover.communicator.engine import Engine
from trainmover.communicator.frames import (
    FLAG_IN_RING,
    HEADER,
    HEADER_BYTES,
    TRAILER_OK,
    TRAILER_POISON,
    FrameType,
    Header,
    decode_header,
)
from trainmover.communicator.memory import bytes_of
from trainmover.communicator.operation import Receive
from trainmover.communicator.ports import OutFrame, Port
from trainmover.communicator.settings import ChannelInfo, CommunicatorConfig
from trainmover.communicator.shared_memory import RingPair
from trainmover.errors import RemoteProtocolError

_READS_PER_TURN = 8
_FRAMES_PER_CALL = 8
_POOL_SIZE = 2


class ChannelOwner(Protocol):
    """What a channel asks of the communicator; called under the lock."""

    def data_port(self, channel: Channel, header: Header) -> Port | None:
        """Port of a data frame; None where it is to be dropped."""

    def small_frame(self, channel: Channel, header: Header, payload: bytes) -> None:
        """A frame other than DATA."""

    def keep_early(self, channel: Channel, header: Header, payload: bytearray) -> bool:
        """Keep a data frame of a generation not known yet; False for one to be dropped."""

    def broken(self, channel: Channel, reason: str) -> None:
        """The stream ended; called once."""

    def drain(self) -> None:
        """Called without the lock after each turn of reading or writing."""


class _Arrival:
    """A large payload being received."""

    __slots__ = ("header", "port", "receive", "view", "filled", "scratch", "is_pooled")

    def __init__(self, header: Header, port: Port | None) -> None:
        self.header = header
        self.port = port
        self.receive: Receive | None = None
        self.view = memoryview(b"")
        self.filled = 0
        self.scratch: torch.Tensor | bytearray | None = None
        self.is_pooled = False


class Channel:
    """A connection between this process and one peer incarnation."""

    def __init__(
        self,
        engine: Engine,
        owner: ChannelOwner,
        sock: socket.socket,
        peer: str,
        opened_for: int,
        config: CommunicatorConfig,
    ) -> None:
        self.id = 0
        self.opened_at = 0
        self.peer = peer
        self.opened_for = opened_for
        """Generation of the handshake: a later generation inherits this channel."""
        self.ring: RingPair | None = None
        self.marks: set[int] = set()
        self.early: list[tuple[Header, bytes | bytearray]] = []
        self.early_bytes = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.frames_out = 0
        self.is_closed = False
        self._engine = engine
        self._owner = owner
        self._config = config
        self._socket = sock
        self._fd = sock.fileno()
        self._queue: deque[OutFrame] = deque()
        self._is_blocked = False
        self._is_flush_due = False
        self._is_paused = False
        self._unexpected_bytes = 0
        self._rx = bytearray(2 * (config.inline_bytes + 2 * HEADER_BYTES) + 65536)
        self._rx_view = memoryview(self._rx)
        self._start = 0
        self._end = 0
        self._arrival: _Arrival | None = None
        self._pool: list[torch.Tensor] = []

    @property
    def fd(self) -> int:
        """File descriptor, -1 when closed."""
        return self._fd

    @property
    def info(self) -> ChannelInfo:
        """Facts for assertions and reports."""
        return ChannelInfo(
            self.id,
            self.peer,
            self.opened_at,
            self._fd,
            self.ring is not None,
            self.bytes_in,
            self.bytes_out,
        )

    def start(self) -> None:
        """Begin reading; on the I/O thread."""
        self._engine.watch(self._fd, self._on_readable, self._on_writable)

    # -- sending -------------------------------------------------------------

    def send(self, frame: OutFrame) -> None:
        """Queue a frame; small ones leave at once where the socket takes them."""
        if self.is_closed:
            if frame.operation is not None:
                frame.operation.left()
            return
        if frame.is_data and self.ring is not None:
            self._into_ring(frame)
        self._queue.append(frame)
        if self._is_blocked or self._is_flush_due:
            return
        if frame.left <= self._config.inline_bytes:
            self.flush()
        else:
            self._is_flush_due = True
            self._engine.submit(self._flush_soon)

    def _into_ring(self, frame: OutFrame) -> None:
        """Large payloads wait for ring space at the moment they are sent, in queue order."""
        if len(frame.payload) >= self._config.shared_memory_min_bytes:
            frame.is_for_ring = True

    def _flush_soon(self) -> None:
        with self._engine.lock:
            self._is_flush_due = False
            if not self.is_closed:
                self.flush()
        self._owner.drain()

    def _on_writable(self) -> None:
        with self._engine.lock:
            if not self.is_closed:
                self._is_blocked = False
                self.flush()
                if not self._is_blocked and not self.is_closed:
                    self._engine.modify(self._fd, False, not self._is_paused)
        self._owner.drain()

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
                self._is_blocked = True
                self._engine.modify(self._fd, True, not self._is_paused)
                return
            except OSError as error:
                self.fail(f"send failed: {error.strerror or error}")
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
        if not self._is_blocked:
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

    def cut_generation(self, generation: int) -> None:
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
        arrival = self._arrival
        if arrival is not None and arrival.header.generation == generation:
            _divert(arrival)

    # -- receiving -----------------------------------------------------------

    def _on_readable(self) -> None:
        with self._engine.lock:
            if not self.is_closed:
                if self._is_paused:
                    self.fail("closed while more data than allowed was waiting")
                else:
                    self._read()
        self._owner.drain()

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            arrival = self._arrival
            try:
                if arrival is not None and arrival.filled < len(arrival.view):
                    space = arrival.view[arrival.filled :]
                    asked = len(space) + len(self._rx)
                    count = self._socket.recvmsg_into([space, self._rx_view])[0]
                    direct = min(count, len(space))
                    arrival.filled += direct
                    self._start, self._end = 0, count - direct
                else:
                    asked = len(self._rx) - self._end
                    count = self._socket.recv_into(self._rx_view[self._end :])
                    self._end += count
            except BlockingIOError:
                return
            except OSError as error:
                self.fail(f"receive failed: {error.strerror or error}")
                return
            if count == 0:
                self.fail("closed by the peer")
                return
            self.bytes_in += count
            try:
                self._parse()
            except RemoteProtocolError as error:
                self.fail(f"corrupt stream: {error}")
                return
            if self.is_closed or self._is_paused or count < asked:
                return

    def _parse(self) -> None:
        while not self.is_closed:
            if self._arrival is not None and not self._end_arrival():
                break
            available = self._end - self._start
            if available < HEADER_BYTES:
                break
            header = decode_header(self._rx, self._start)
            is_data = header.type == FrameType.DATA
            inside = 0 if header.flags & FLAG_IN_RING else header.length
            if inside > self._config.inline_bytes:
                self._begin_arrival(header)
                continue
            total = HEADER_BYTES + inside + (1 if is_data else 0)
            if available < total:
                break
            at = self._start + HEADER_BYTES
            self._start += total
            payload = self._rx_view[at : at + inside]
            if not is_data:
                self._owner.small_frame(self, header, bytes(payload))
            elif self._is_whole(at + inside):
                self._take(header, payload)
            elif header.flags & FLAG_IN_RING and self.ring is not None:
                self.ring.peek(header.length)
                self._free_ring(header.length)
        self._compact()

    def _is_whole(self, at: int) -> bool:
        trailer = bytes(self._rx_view[at : at + 1])
        if trailer not in (TRAILER_OK, TRAILER_POISON):
            raise RemoteProtocolError(f"data frame ends with {trailer!r}")
        return trailer == TRAILER_OK

    def _compact(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._rx) - self._start < self._config.inline_bytes + HEADER_BYTES + 1:
            rest = self._end - self._start
            self._rx[:rest] = self._rx[self._start : self._end]
            self._start, self._end = 0, rest

    def _take(self, header: Header, payload: memoryview) -> None:
        """A complete data frame."""
        if header.flags & FLAG_IN_RING:
            self._take_from_ring(header)
            return
        port = self._owner.data_port(self, header)
        if port is None:
            self._owner.keep_early(self, header, bytearray(payload))
            return
        receive = port.match(header)
        if receive is None:
            port.keep(header, bytearray(payload))
        else:
            receive.take(payload)

    def _take_from_ring(self, header: Header) -> None:
        if self.ring is None:
            raise RemoteProtocolError("payload in a ring that this channel does not have")
        raw = self.ring.peek(header.length)
        self.bytes_in += header.length
        port = self._owner.data_port(self, header)
        receive = None if port is None else port.match(header)
        if receive is not None:
            receive.take_tensor(raw)
        elif port is not None:
            port.keep(header, raw.clone())
        else:
            self._owner.keep_early(self, header, bytearray(bytes_of(raw)))
        self._free_ring(header.length)

    def _free_ring(self, length: int) -> None:
        assert self.ring is not None
        credit = self.ring.skip(length)
        if credit:
            header = HEADER.pack(FrameType.ROOM, 0, 0, 0, 0, 0, 0, 0, 0, credit)
            self._send_first(OutFrame(header, b"", 0))

    def _send_first(self, frame: OutFrame) -> None:
        """Ahead of frames that wait for ring space: the peer may wait for this one."""
        is_partial = bool(self._queue) and self._queue[0].is_started
        self._queue.insert(1 if is_partial else 0, frame)
        if not self._is_blocked:
            self.flush()

    def _begin_arrival(self, header: Header) -> None:
        is_data = header.type == FrameType.DATA
        port = self._owner.data_port(self, header) if is_data else None
        arrival = _Arrival(header, port)
        if port is not None:
            arrival.receive = port.match(header)
        if arrival.receive is not None and arrival.receive.view is not None:
            arrival.view = arrival.receive.view
            arrival.receive.operation.touch()
        elif port is not None:
            arrival.scratch = self._scratch(arrival, header.length)
            arrival.view = bytes_of(arrival.scratch)
        else:
            arrival.scratch = bytearray(header.length)
            arrival.view = memoryview(arrival.scratch)
        at = self._start + HEADER_BYTES
        here = min(self._end - at, header.length)
        arrival.view[:here] = self._rx_view[at : at + here]
        arrival.filled = here
        self._start = at + here
        self._arrival = arrival

    def _scratch(self, arrival: _Arrival, length: int) -> torch.Tensor:
        if arrival.receive is not None and length <= self._config.chunk_bytes:
            arrival.is_pooled = True
            if self._pool:
                return self._pool.pop()[:length]
            return torch.empty(self._config.chunk_bytes, dtype=torch.uint8)[:length]
        return torch.empty(length, dtype=torch.uint8)

    def _end_arrival(self) -> bool:
        """Hand over a large payload; False while bytes are missing."""
        arrival = self._arrival
        assert arrival is not None
        if arrival.filled < len(arrival.view):
            self._start = self._end = 0
            return False
        is_data = arrival.header.type == FrameType.DATA
        if is_data and self._start == self._end:
            self._start = self._end = 0
            return False
        self._arrival = None
        if not is_data:
            assert isinstance(arrival.scratch, bytearray)
            self._owner.small_frame(self, arrival.header, bytes(arrival.scratch))
            return True
        self._start += 1
        if self._is_whole(self._start - 1):
            self._hand_over(arrival)
        return True

    def _hand_over(self, arrival: _Arrival) -> None:
        if arrival.port is None:
            if isinstance(arrival.scratch, bytearray):
                self._owner.keep_early(self, arrival.header, arrival.scratch)
        elif arrival.receive is None:
            if isinstance(arrival.scratch, torch.Tensor):
                arrival.port.keep(arrival.header, arrival.scratch)
        elif isinstance(arrival.scratch, torch.Tensor):
            arrival.receive.take_tensor(arrival.scratch)
            if arrival.is_pooled and len(self._pool) < _POOL_SIZE:
                whole = arrival.scratch.as_strided((self._config.chunk_bytes,), (1,))
                self._pool.append(whole)
        else:
            arrival.receive.landed()

    # -- bounds --------------------------------------------------------------

    def unexpected_kept(self, count: int) -> None:
        """Data nobody asked for is kept; beyond the bound reading pauses."""
        self._unexpected_bytes += count
        if self._unexpected_bytes > self._config.unexpected_bytes and not self._is_paused:
            self._is_paused = True
            self._engine.modify(self._fd, self._is_blocked, False)

    def unexpected_taken(self, count: int) -> None:
        """Kept data was consumed or dropped."""
        self._unexpected_bytes -= count
        if self._is_paused and self._unexpected_bytes <= self._config.unexpected_bytes // 2:
            self._is_paused = False
            if not self.is_closed:
                self._engine.modify(self._fd, self._is_blocked, True)
                self._engine.submit(self._resume)

    def _resume(self) -> None:
        with self._engine.lock:
            if not self.is_closed and not self._is_paused:
                self._parse()
        self._owner.drain()

    # -- the end -------------------------------------------------------------

    @property
    def is_drained(self) -> bool:
        """Nothing is waiting to be sent."""
        return not self._queue

    def fail(self, reason: str) -> None:
        """Close because the stream is unusable, and tell the owner."""
        if not self.is_closed:
            self.close()
            self._owner.broken(self, reason)

    def close(self) -> None:
        """Close on purpose; the owner is not told."""
        if self.is_closed:
            return
        self.is_closed = True
        self._engine.unwatch(self._fd)
        self._fd = -1
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer was faster
        self._socket.close()
        if self._arrival is not None:
            _divert(self._arrival)
        for frame in self._queue:
            frame.operation = None  # its work ends by the break that follows
        self._queue.clear()

    def close_in_child(self) -> None:
        """Drop the descriptors in a forked child; the parent's stay as they are."""
        self.is_closed = True
        self._fd = -1
        self._socket.close()


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


def _divert(arrival: _Arrival) -> None:
    """Let the rest of an arriving payload go nowhere."""
    if arrival.receive is not None or not isinstance(arrival.scratch, bytearray):
        arrival.receive = None
        arrival.port = None
        arrival.scratch = None
        arrival.view = memoryview(bytearray(len(arrival.view)))
