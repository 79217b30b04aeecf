"""Words and framing between agents, workers and the controller about snapshots and disks.

Both ends prove that they know the job's secret before anything else is read; each message carries a
keyed digest and a number; bulk bytes travel bare, and a sealed message behind them carries their
digest. No pickle. Every wait is bounded by the socket's time-out.
"""

from __future__ import annotations

import socket
from typing import Final, TypeVar

import msgspec

from trainmover.edges import seal
from trainmover.errors import AuthenticationFailed, RemoteProtocolError, TransportError
from trainmover.protocol.carried import Version

MAGIC: Final = b"tmsnap1\n"
MESSAGE_LIMIT_BYTES: Final = 1 << 30
"""Personal state of a rank is in the description: loaders may keep much."""
SOCKET_BUFFER_BYTES: Final = 4 << 20
LENGTH_BYTES: Final = 4

M = TypeVar("M", bound="WireMessage")


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of what is said here."""


class FetchImage(WireMessage, frozen=True, kw_only=True):
    """Client: send me this rank's snapshot."""

    rank: int
    version: Version


class StoreImage(WireMessage, frozen=True, kw_only=True):
    """Client: keep this snapshot; its bytes follow once it is wanted."""

    rank: int
    version: Version
    identity: str
    size_bytes: int
    bulk_digest: int
    is_suspect: bool = False


class ImageFollows(WireMessage, frozen=True, kw_only=True):
    """Server: description now, bulk bytes behind this message."""

    description: bytes
    bulk_bytes: int
    bulk_digest: int


class Wanted(WireMessage, frozen=True, kw_only=True):
    """Server: send it, or do not: it is here already."""

    is_wanted: bool


class EndOfBytes(WireMessage, frozen=True, kw_only=True):
    """Sender, behind the bytes: their digest, and whether they were whole while they were read."""

    digest: int
    is_whole: bool = True


class Kept(WireMessage, frozen=True, kw_only=True):
    """Server: stored and verified."""


class Refusal(WireMessage, frozen=True, kw_only=True):
    """Server: no, and why."""

    reason: str


class LookAtDisk(WireMessage, frozen=True, kw_only=True):
    """Client: what checkpoints are on this machine's own disk?"""


class CheckpointOnDisk(msgspec.Struct, frozen=True, kw_only=True):
    """A directory with a checkpoint's name."""

    folder: str
    """Directory of the tier: the name that the machine had when it was written."""
    name: str
    fingerprint: str
    """Equal for manifests of the same files; empty: there is no valid manifest."""
    files: tuple[tuple[str, int], ...]
    """What is there, with sizes; of a checkpoint of many machines a part."""


class DiskSeen(WireMessage, frozen=True, kw_only=True):
    """Server: everything that is there."""

    found: tuple[CheckpointOnDisk, ...]


class ReadFile(WireMessage, frozen=True, kw_only=True):
    """Client: bytes of a file there."""

    folder: str
    path: str
    """Checkpoint and file."""
    position: int
    count: int


class BytesFollow(WireMessage, frozen=True, kw_only=True):
    """Server: so many bytes, fewer than asked for at the end of the file, behind this message."""

    count: int


class CheckFiles(WireMessage, frozen=True, kw_only=True):
    """Client: compare these files with their checksums; they need not travel for that."""

    folder: str
    name: str
    paths: tuple[str, ...]


class StillChecking(WireMessage, frozen=True, kw_only=True):
    """Server: so many bytes more were compared."""

    byte_count: int


class FilesChecked(WireMessage, frozen=True, kw_only=True):
    """Server: what differs, with the reason."""

    damages: tuple[tuple[str, str], ...]


class Enough(WireMessage, frozen=True, kw_only=True):
    """Client: nothing more is asked on this connection."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    FetchImage
    | StoreImage
    | ImageFollows
    | Wanted
    | EndOfBytes
    | Kept
    | Refusal
    | LookAtDisk
    | DiskSeen
    | ReadFile
    | BytesFollow
    | CheckFiles
    | StillChecking
    | FilesChecked
    | Enough
)


class Wire:
    """One authenticated connection; blocking, with the socket's time-out for every wait."""

    def __init__(self, stream: socket.socket, secret: bytes, *, is_client: bool) -> None:
        self.stream = stream
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = seal.new_nonce()
        self._send([memoryview(MAGIC + nonce)])
        hello = bytes(self._receive(len(MAGIC) + seal.NONCE_BYTES))
        if hello[: len(MAGIC)] != MAGIC:
            raise RemoteProtocolError("whoever is at the other end speaks another protocol")
        theirs = hello[len(MAGIC) :]
        nonces = (nonce, theirs) if is_client else (theirs, nonce)
        key = seal.derive(secret.hex(), "snapshots", *nonces)
        me, other = ("client", "server") if is_client else ("server", "client")
        self._seal = seal.Seal(key, sends_as=me, receives_from=other)
        self._has_heard = False

    def send(self, message: WireMessage) -> None:
        """One message."""
        data = self._seal.close(_encoder.encode(message))
        self._send([memoryview(len(data).to_bytes(LENGTH_BYTES, "big") + data)])

    def receive(self, kind: type[M]) -> M:
        """The next message. Raises TransportError with the other end's reason if it refuses."""
        message = self.receive_any()
        if isinstance(message, Refusal):
            raise TransportError(message.reason)
        if not isinstance(message, kind):
            raise RemoteProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def receive_any(self) -> WireMessage:
        """The next message, whatever it is."""
        size = int.from_bytes(self._receive(LENGTH_BYTES), "big")
        if size > MESSAGE_LIMIT_BYTES:
            raise RemoteProtocolError(f"a message of {size} bytes was announced")
        data = bytes(self._receive(size))
        try:
            payload = self._seal.open(data)
        except RemoteProtocolError as error:
            if self._has_heard:
                raise
            raise AuthenticationFailed("the other end does not know this job's secret") from error
        self._has_heard = True
        try:
            message: WireMessage = _decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"a message about snapshots is malformed: {error}") from error
        return message

    def send_bytes(self, view: memoryview) -> None:
        """Bare bytes."""
        self._send([view])

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with bare bytes."""
        at = 0
        while at < len(view):
            try:
                count = self.stream.recv_into(view[at:])
            except OSError as error:
                text = f"a snapshot's stream broke: {error or 'no byte in time'}"
                raise TransportError(text) from error
            if count == 0:
                raise TransportError("the other end closed in the middle of a snapshot")
            at += count

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def _send(self, buffers: list[memoryview]) -> None:
        try:
            for buffer in buffers:
                self.stream.sendall(buffer)
        except OSError as error:
            text = f"a snapshot's stream broke: {error or 'nothing read in time'}"
            raise TransportError(text) from error
