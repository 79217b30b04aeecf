"""Client's end: fetch a snapshot from an agent's memory, or give an agent one to keep.

Called on a worker's main thread, or on a thread of an agent; blocks at most the given time without
progress. Memory: none on top of the caller's buffers.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import xxhash

from trainmover.edges.errand import Errand
from trainmover.edges.snapshot_wire import (
    SOCKET_BUFFER_BYTES,
    EndOfBytes,
    FetchImage,
    ImageFollows,
    Kept,
    StoreImage,
    Wanted,
    Wire,
)
from trainmover.errors import StateMismatch, TransportError
from trainmover.protocol.carried import Version
from trainmover.protocol.snapshot_image import (
    DIGEST_MASK,
    ImageDescription,
    ImageEntry,
    decode_description,
)

CHUNK_BYTES: Final = 1 << 20
"""Hashed while it is still in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Where an agent's snapshots are served, and how to prove that one may ask."""

    host: str
    port: int
    secret: bytes
    limit_s: float


class Sendable(Protocol):
    """What an agent keeps of a snapshot, as far as sending it needs."""

    @property
    def rank(self) -> int:
        """Whose state it is."""

    @property
    def version(self) -> Version:
        """Of the state."""

    @property
    def identity(self) -> str:
        """Of the bulk state."""

    @property
    def bulk_digest(self) -> int:
        """Of the bulk state."""

    @property
    def is_suspect(self) -> bool:
        """Whether the loss was not finite."""

    @property
    def size_bytes(self) -> int:
        """Of the whole image."""

    @property
    def is_unchanged(self) -> bool:
        """Whether it is still the image it was."""

    def whole(self) -> memoryview:
        """Header, bulk and description."""


class Fetch:
    """One snapshot on its way: description first, then bulk bytes entry by entry."""

    def __init__(self, wire: Wire, head: ImageFollows) -> None:
        self._wire = wire
        self._digest = xxhash.xxh3_64()
        self._at = 0
        self._size = head.bulk_bytes
        self.bulk_digest = head.bulk_digest
        self.description: ImageDescription = decode_description(head.description)

    def read(self, entry: ImageEntry, view: memoryview) -> None:
        """Bytes of one entry into `view`; entries are asked for in their order."""
        if entry.offset < self._at or entry.offset + entry.size_bytes > self._size:
            raise StateMismatch(f"{entry.name} lies outside of its snapshot, or was read before")
        self._skip(entry.offset - self._at)
        for start in range(0, len(view), CHUNK_BYTES):
            self._take(view[start : start + CHUNK_BYTES])

    def end(self) -> None:
        """All has been read: verify. Raises StateMismatch."""
        self._skip(self._size - self._at)
        end = self._wire.receive(EndOfBytes)
        if not end.is_whole:
            raise StateMismatch("the snapshot was overwritten while it was read")
        if end.digest != self._digest.intdigest() & DIGEST_MASK:
            raise StateMismatch("bytes of a snapshot were damaged on the way")

    def _skip(self, count: int) -> None:
        while count > 0:
            part = bytearray(min(count, CHUNK_BYTES))
            self._take(memoryview(part))
            count -= len(part)

    def _take(self, view: memoryview) -> None:
        self._wire.receive_into(view)
        self._digest.update(view)
        self._at += len(view)


@contextmanager
def fetching(
    holder: Holder, rank: int, version: Version, errand: Errand | None = None
) -> Iterator[Fetch]:
    """A snapshot that `holder` has, for as long as `errand` is wanted.

    Raises TransportError, StateMismatch.
    """
    with _connected(holder, errand) as wire:
        wire.send(FetchImage(rank=rank, version=version))
        yield Fetch(wire, wire.receive(ImageFollows))


def give(holder: Holder, snapshot: Sendable, errand: Errand | None = None) -> bool:
    """Have `holder` keep a copy, while `errand` is wanted; False where it had it already.

    Raises TransportError, StateMismatch (overwritten while it was sent).
    """
    with _connected(holder, errand) as wire:
        wire.send(
            StoreImage(
                rank=snapshot.rank,
                version=snapshot.version,
                identity=snapshot.identity,
                size_bytes=snapshot.size_bytes,
                bulk_digest=snapshot.bulk_digest,
                is_suspect=snapshot.is_suspect,
            )
        )
        if not wire.receive(Wanted).is_wanted:
            return False
        end = send_whole(wire, snapshot.whole(), snapshot)
        wire.receive(Kept)
        if not end.is_whole:
            raise StateMismatch(f"the snapshot of {snapshot.version} was overwritten meanwhile")
        return True


def send_whole(wire: Wire, view: memoryview, snapshot: Sendable) -> EndOfBytes:
    """Bytes, then their digest and whether they were those of one image to the end."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(view), CHUNK_BYTES):
        part = view[start : start + CHUNK_BYTES]
        digest.update(part)
        wire.send_bytes(part)
    end = EndOfBytes(digest=digest.intdigest() & DIGEST_MASK, is_whole=snapshot.is_unchanged)
    wire.send(end)
    return end


@contextmanager
def _connected(holder: Holder, errand: Errand | None = None) -> Iterator[Wire]:
    wire = connect(holder, errand)
    with wire.stream:
        yield wire


def connect(holder: Holder, errand: Errand | None = None) -> Wire:
    """A connection to an agent's data port; whoever asks closes it. Raises TransportError."""
    errand = errand or Errand("a snapshot", holder.limit_s)
    try:
        stream = errand.connect(holder.host, holder.port)
    except OSError as error:
        text = f"no agent answers at {holder.host}:{holder.port} for snapshots: {error}"
        raise TransportError(text) from error
    try:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            stream.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        return Wire(stream, holder.secret, is_client=True)
    except BaseException:
        stream.close()
        raise
