"""Moves a rank's state over one authenticated blocking socket, straight between tensor memories.

Decides framing and verification: manifest, bulk bytes in manifest order with the running digest
of every entry behind each chunk, small leaves, then the digests of everything; the receiver
answers whether they were equal. Does not decide who serves whom or at which version.

No pickle. Every wait is bounded by the socket's time-out. Memory on top of the tensors: nothing
for tensors that are one block of CPU memory, else one entry at a time.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import torch
import xxhash

from trainmover.errors import StateMismatch, TransportError
from trainmover.state.inventory import Inventory
from trainmover.state.manifest import StateManifest
from trainmover.state.tensors import (
    DIGEST_MASK,
    byte_copy,
    byte_view,
    bytes_digest,
    fold_digests,
)
from trainmover.units import MIB

CHUNK_BYTES: Final = 1 * MIB
"""Small enough to be hashed while it is still in the cache."""

PIECES_PER_CHUNK: Final = 256
"""Below the limit of buffers in one system call."""

DEFAULT_TIMEOUT_S: Final = 30.0
"""For a socket that was handed over without a time-out of its own."""

SOCKET_BUFFER_BYTES: Final = 4 * MIB
FRAME_LIMIT_BYTES: Final = 1 << 31

_HEADER: Final = struct.Struct("<4sBxxxQQ")
_MAGIC: Final = b"tmst"
_MANIFEST, _SMALL, _END, _VERDICT = 1, 2, 3, 4

Progress = Callable[[float], None]
T = TypeVar("T")


@dataclass(frozen=True)
class TransferReport:
    """What one transfer moved."""

    bytes: int
    seconds: float
    entries: int
    bulk_digest: int
    small_digests: dict[str, int]


class _Small(msgspec.Struct, frozen=True, array_like=True):
    name: str
    data: bytes


class _End(msgspec.Struct, frozen=True, array_like=True):
    bulk_digest: int
    small_digests: dict[str, int]


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
    problem: str


@dataclass
class _Piece:
    """A run of bytes of one entry, in one chunk."""

    entry: int
    view: memoryview


def serve_state(
    stream: socket.socket,
    inventory: Inventory,
    *,
    smalls: bool,
    progress: Progress | None = None,
) -> TransferReport:
    """Send this rank's state to a joiner and wait until the joiner has verified it.

    Called on: the restore source, with nobody writing to the state meanwhile.
    Blocks: at most the socket's time-out without progress.

    Args:
        stream: Authenticated blocking socket; its time-out bounds every wait. Not closed here.
        inventory: Tracked state.
        smalls: Whether small leaves are sent too.
        progress: Told the part of the bulk bytes sent so far, 0.0 to 1.0.
    Raises:
        TransportError: The connection broke or a wait ran out.
        StateMismatch: The receiver refused or found other digests; carries its reason.
    """
    started = time.monotonic()
    _prepare(stream)
    manifest = inventory.manifest()
    try:
        _send_frame(stream, _MANIFEST, msgspec.msgpack.encode(manifest))
        mover = _Mover(manifest, [tensor for _, tensor in inventory.bulk()], progress)
        mover.send_all(stream)
        small_digests = {}
        for name in inventory.small_names if smalls else ():
            data = inventory.small_bytes(name)
            small_digests[name] = bytes_digest(data)
            _send_frame(stream, _SMALL, msgspec.msgpack.encode(_Small(name, data)))
        end = _End(mover.bulk_digest(), small_digests)
        _send_frame(stream, _END, msgspec.msgpack.encode(end))
    except (OSError, TransportError) as problem:
        raise _with_verdict(stream, problem) from problem
    verdict = _receive(stream, _VERDICT, _Verdict)
    if verdict.problem:
        raise StateMismatch(f"the receiver refused the state: {verdict.problem}")
    return _report(manifest, started, end)


def receive_state(
    stream: socket.socket, inventory: Inventory, *, progress: Progress | None = None
) -> TransferReport:
    """Take over the state a peer serves, in place, and verify every byte.

    Called on: a joiner. Blocks: at most the socket's time-out without progress.

    Args:
        stream: Authenticated blocking socket; its time-out bounds every wait. Not closed here.
        inventory: Tracked state; written to. After an exception its contents are undefined.
        progress: Told the part of the bulk bytes received so far, 0.0 to 1.0.
    Raises:
        TransportError: The connection broke or a wait ran out.
        StateMismatch: Structure or digests differ; the first differing entry is named.
    """
    started = time.monotonic()
    _prepare(stream)
    try:
        manifest = _receive(stream, _MANIFEST, StateManifest)
        inventory.conform(manifest)
        mover = _Mover(manifest, [tensor for _, tensor in inventory.bulk()], progress)
        mover.receive_all(stream)
        end = _receive_smalls(stream, inventory, mover)
    except StateMismatch as problem:
        _send_verdict(stream, str(problem))
        raise
    _send_verdict(stream, "")
    return _report(manifest, started, end)


def _receive_smalls(stream: socket.socket, inventory: Inventory, mover: _Mover) -> _End:
    smalls: list[_Small] = []
    while True:
        kind, payload = _receive_frame(stream)
        if kind == _END:
            break
        if kind != _SMALL or len(smalls) >= len(inventory.small_names):
            raise StateMismatch(f"unexpected frame {kind} among the small leaves")
        smalls.append(_decoded(payload, _Small))
    end = _decoded(payload, _End)
    if end.bulk_digest != mover.bulk_digest():
        raise StateMismatch("the digest of the bulk state differs although all entries agree")
    received = {small.name: bytes_digest(small.data) for small in smalls}
    if received != end.small_digests:
        raise StateMismatch(f"small leaves {end.small_digests} were sent, {received} arrived")
    for small in smalls:
        inventory.load_small(small.name, small.data)
    for name, digest in received.items():
        if inventory.small_digest(name) != digest:
            raise StateMismatch(f"small leaf {name} is not what was loaded into it")
    return end


class _Mover:
    """Bulk bytes in chunks; keeps the running digest of every entry."""

    def __init__(
        self, manifest: StateManifest, tensors: list[torch.Tensor], progress: Progress | None
    ) -> None:
        self._names = [entry.name for entry in manifest.entries]
        self._sizes = [entry.size_bytes for entry in manifest.entries]
        self._tensors = tensors
        self._progress = progress
        self._total = manifest.total_bytes
        self._moved = 0
        self._hashes = [xxhash.xxh3_64() for _ in tensors]
        self._chunk: list[_Piece] = []
        self._room = CHUNK_BYTES
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bulk_digest(self) -> int:
        """Equal to `Inventory.bulk_digest()` of what was moved."""
        digests = [digest.intdigest() & DIGEST_MASK for digest in self._hashes]
        return fold_digests(list(zip(self._names, digests, strict=True)))

    def send_all(self, stream: socket.socket) -> None:
        """Send every entry."""
        for index, tensor in enumerate(self._tensors):
            if self._sizes[index]:
                self._cut(index, byte_copy(tensor), lambda: self._send_chunk(stream))
        self._send_chunk(stream)

    def receive_all(self, stream: socket.socket) -> None:
        """Receive every entry into its tensor."""
        for index, tensor in enumerate(self._tensors):
            if not self._sizes[index]:
                continue
            view = byte_view(tensor)
            if view is not None:
                self._cut(index, view, lambda: self._receive_chunk(stream))
                continue
            # Not one block of CPU memory: through a copy of this one entry.
            staging = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._cut(index, byte_copy(staging), lambda: self._receive_chunk(stream))
            self._staged.append((tensor, staging))
            if not self._chunk:
                self._unstage()
        self._receive_chunk(stream)

    def _unstage(self) -> None:
        """Copy entries whose last byte has arrived to where they belong."""
        with torch.no_grad():
            for tensor, staging in self._staged:
                tensor.detach().copy_(staging)
        self._staged = []

    def _cut(self, index: int, view: memoryview, flush: Callable[[], None]) -> None:
        start = 0
        while start < len(view):
            size = min(self._room, len(view) - start)
            self._chunk.append(_Piece(index, view[start : start + size]))
            self._room -= size
            start += size
            if self._room == 0 or len(self._chunk) == PIECES_PER_CHUNK:
                flush()

    def _send_chunk(self, stream: socket.socket) -> None:
        if self._chunk:
            buffers = [piece.view for piece in self._chunk]
            _send_buffers(stream, [*buffers, memoryview(self._digests_of_chunk())])
            self._advance()

    def _receive_chunk(self, stream: socket.socket) -> None:
        if not self._chunk:
            return
        theirs = bytearray(8 * len(self._chunk))
        _receive_buffers(stream, [*(piece.view for piece in self._chunk), memoryview(theirs)])
        mine = self._digests_of_chunk()
        if mine != theirs:
            for position, piece in enumerate(self._chunk):
                place = slice(8 * position, 8 * position + 8)
                if mine[place] != theirs[place]:
                    raise StateMismatch(
                        f"bytes of {self._names[piece.entry]} were damaged on the way: "
                        f"digest {theirs[place].hex()} sent, {mine[place].hex()} received"
                    )
        self._advance()
        self._unstage()

    def _digests_of_chunk(self) -> bytes:
        digests = []
        for piece in self._chunk:
            running = self._hashes[piece.entry]
            running.update(piece.view)
            digests.append(running.digest())
        return b"".join(digests)

    def _advance(self) -> None:
        self._moved += sum(len(piece.view) for piece in self._chunk)
        self._chunk = []
        self._room = CHUNK_BYTES
        if self._progress is not None:
            self._progress(self._moved / self._total)


def _report(manifest: StateManifest, started: float, end: _End) -> TransferReport:
    return TransferReport(
        bytes=manifest.total_bytes,
        seconds=time.monotonic() - started,
        entries=len(manifest.entries),
        bulk_digest=end.bulk_digest,
        small_digests=end.small_digests,
    )


def _prepare(stream: socket.socket) -> None:
    if stream.gettimeout() is None:
        stream.settimeout(DEFAULT_TIMEOUT_S)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        stream.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def _send_buffers(stream: socket.socket, buffers: list[memoryview]) -> None:
    try:
        while buffers:
            sent = stream.sendmsg(buffers)
            buffers = _remaining(buffers, sent)
    except TimeoutError as problem:
        raise TransportError(f"the peer took no state for {stream.gettimeout()} s") from problem
    except OSError as problem:
        raise TransportError(f"the connection broke while sending state: {problem}") from problem


def _receive_buffers(stream: socket.socket, buffers: list[memoryview]) -> None:
    try:
        while buffers:
            received = stream.recvmsg_into(buffers)[0]
            if received == 0:
                raise TransportError("the peer closed the connection in the middle of the state")
            buffers = _remaining(buffers, received)
    except TimeoutError as problem:
        raise TransportError(f"the peer sent no state for {stream.gettimeout()} s") from problem
    except OSError as problem:
        raise TransportError(f"the connection broke while receiving state: {problem}") from problem


def _remaining(buffers: list[memoryview], done: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def _send_frame(stream: socket.socket, kind: int, payload: bytes) -> None:
    header = _HEADER.pack(_MAGIC, kind, len(payload), bytes_digest(payload))
    _send_buffers(stream, [memoryview(header), memoryview(payload)])


def _receive_frame(stream: socket.socket) -> tuple[int, bytes]:
    header = bytearray(_HEADER.size)
    _receive_buffers(stream, [memoryview(header)])
    magic, kind, size, digest = _HEADER.unpack(header)
    if magic != _MAGIC or size > FRAME_LIMIT_BYTES:
        raise StateMismatch(f"the stream of state is out of step: {bytes(header).hex()} received")
    payload = bytearray(size)
    if size:
        _receive_buffers(stream, [memoryview(payload)])
    if bytes_digest(payload) != digest:
        raise StateMismatch(f"a frame of kind {kind} was damaged on the way")
    return kind, bytes(payload)


def _receive(stream: socket.socket, kind: int, struct_type: type[T]) -> T:
    got, payload = _receive_frame(stream)
    if got != kind:
        raise StateMismatch(f"frame {kind} expected, {got} received")
    return _decoded(payload, struct_type)


def _decoded(payload: bytes, struct_type: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(payload, type=struct_type)
    except msgspec.MsgspecError as problem:
        raise StateMismatch(f"a frame of state can't be decoded: {problem}") from problem


def _send_verdict(stream: socket.socket, problem: str) -> None:
    _send_frame(stream, _VERDICT, msgspec.msgpack.encode(_Verdict(problem)))


def _with_verdict(stream: socket.socket, problem: Exception) -> Exception:
    """The receiver's own reason where it managed to send one before it hung up."""
    try:
        verdict = _receive(stream, _VERDICT, _Verdict)
    except (TransportError, StateMismatch):
        return problem if isinstance(problem, TransportError) else TransportError(str(problem))
    return StateMismatch(f"the receiver refused the state: {verdict.problem}")
