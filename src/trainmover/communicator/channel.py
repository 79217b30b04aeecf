"""One authenticated stream between two incarnations, carrying every group's frames.

Decides how bytes become frames and back: many small frames in one system call, large payloads
from and into tensor memory without a copy. Owns its socket, no protocol: what a frame means is
decided by its owner. Every method is called under the engine's lock; reading happens on the
thread whose turn it is (engine.py), sending on any.
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

import torch

from trainmover.communicator.arrival import Arrival
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
from trainmover.communicator.outbound import Outbound
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
        self.marks: set[int] = set()
        self.early: list[tuple[Header, bytes | bytearray]] = []
        self.bytes_in = 0
        self.is_closed = False
        self._engine = engine
        self._owner = owner
        self._config = config
        self._socket = sock
        self._fd = sock.fileno()
        self.out = Outbound(engine, sock, config, self.fail, owner.drain)
        self._unexpected_bytes = 0
        self._rx = bytearray(2 * (config.inline_bytes + 2 * HEADER_BYTES) + 65536)
        self._rx_view = memoryview(self._rx)
        self._start = 0
        self._end = 0
        self._arrival: Arrival | None = None
        self._pool: list[torch.Tensor] = []

    @property
    def fd(self) -> int:
        """File descriptor, -1 when closed."""
        return self._fd

    @property
    def ring(self) -> RingPair | None:
        """Shared memory of a same-machine channel."""
        return self.out.ring

    @property
    def info(self) -> ChannelInfo:
        """Facts for assertions and reports."""
        has_ring, bytes_out = self.ring is not None, self.out.bytes_out
        return ChannelInfo(
            self.id, self.peer, self.opened_at, self._fd, has_ring, self.bytes_in, bytes_out
        )

    def start(self) -> None:
        """Begin reading; on the I/O thread."""
        self._engine.watch(self._fd, self._on_readable, self.out.on_writable, can_be_led=True)

    def send(self, frame: OutFrame) -> None:
        """Queue a frame (see outbound.py)."""
        self.out.send(frame)

    def cut_generation(self, generation: int) -> None:
        """Send and take no more data of `generation`: the works' memory is free from now on."""
        self.out.cut(generation)
        arrival = self._arrival
        if arrival is not None and arrival.header.generation == generation:
            arrival.divert()

    # -- receiving -----------------------------------------------------------

    def _on_readable(self) -> None:
        with self._engine.lock:
            if not self.is_closed:
                if self.out.is_paused:
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
            if arrival is not None and arrival.filled < len(arrival.view):
                return
            try:
                self._parse()
            except RemoteProtocolError as error:
                self.fail(f"corrupt stream: {error}")
                return
            if self.is_closed or self.out.is_paused or count < asked:
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
            self.out.send_first(OutFrame(header, b"", 0))

    def _begin_arrival(self, header: Header) -> None:
        is_data = header.type == FrameType.DATA
        port = self._owner.data_port(self, header) if is_data else None
        arrival = Arrival(header, port)
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

    def _scratch(self, arrival: Arrival, length: int) -> torch.Tensor:
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

    def _hand_over(self, arrival: Arrival) -> None:
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
        if self._unexpected_bytes > self._config.unexpected_bytes and not self.out.is_paused:
            self.out.is_paused = True
            self._engine.modify(self._fd, self.out.is_blocked, False)

    def unexpected_taken(self, count: int) -> None:
        """Kept data was consumed or dropped."""
        self._unexpected_bytes -= count
        if self.out.is_paused and self._unexpected_bytes <= self._config.unexpected_bytes // 2:
            self.out.is_paused = False
            if not self.is_closed:
                self._engine.modify(self._fd, self.out.is_blocked, True)
                self._engine.submit(self._resume)

    def _resume(self) -> None:
        with self._engine.lock:
            if not self.is_closed and not self.out.is_paused:
                self._parse()
        self._owner.drain()

    # -- the end -------------------------------------------------------------

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
            self._arrival.divert()
        self.out.close()
        self._engine.submit(self._let_go)

    def _let_go(self) -> None:
        """Give back the memory: who knows a closed channel may be known for long. Not in `close`,
        which a frame that is being parsed may have called."""
        with self._engine.lock:
            self._rx, self._rx_view = bytearray(), memoryview(b"")
            self._start = self._end = 0
            self._arrival = None
            self._pool.clear()

    def reset(self) -> None:
        """Break the connection as a network does: with a reset, and the owner is told."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.fail("the connection was reset")

    def close_in_child(self) -> None:
        """Drop the descriptors in a forked child; the parent's stay as they are."""
        self.is_closed = True
        self._fd = -1
        self._socket.close()
