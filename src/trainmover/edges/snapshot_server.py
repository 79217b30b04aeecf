"""An agent's data port: hands out snapshots and keeps copies for other machines' agents.

Who asks about the machine's own disk is answered by `disk_server`, on the same port.

Decides who may ask (whoever knows the job's secret) and that nothing is kept whose digest differs.
One thread accepts, one more serves each connection; each wait is bounded, and `close` ends all of
them by closing their sockets.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

import xxhash

from trainmover.edges.disk_server import OwnDisks, answer_about_disks
from trainmover.edges.snapshot_client import CHUNK_BYTES, send_whole
from trainmover.edges.snapshot_store import SnapshotStore
from trainmover.edges.snapshot_wire import (
    SOCKET_BUFFER_BYTES,
    CheckFiles,
    EndOfBytes,
    FetchImage,
    ImageFollows,
    Kept,
    LookAtDisk,
    ReadFile,
    Refusal,
    StoreImage,
    Wanted,
    Wire,
)
from trainmover.errors import RemoteProtocolError, StateMismatch, TrainMoverError
from trainmover.protocol.addresses import is_ipv6
from trainmover.protocol.snapshot_image import DIGEST_MASK, encode_description

log = logging.getLogger(__name__)

BACKLOG = 64
IMAGE_LIMIT_BYTES = 1 << 42


class SnapshotServer:
    """Listens from construction to `close`."""

    def __init__(
        self,
        host: str,
        store: SnapshotStore,
        secret: Callable[[], bytes | None],
        on_stored: Callable[[], None],
        limit_s: float,
        disks: OwnDisks,
    ) -> None:
        self._store = store
        self._disks = disks
        self._secret = secret
        self._on_stored = on_stored
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._streams: set[socket.socket] = set()
        self._is_closed = False
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for stream in (self._listener, *streams):
            _shut(stream)
        self._listener.close()
        self._thread.join(self._limit_s)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._serve, args=(stream,), name="snapshot", daemon=True
            ).start()

    def _serve(self, stream: socket.socket) -> None:
        with self._lock:
            self._streams.add(stream)
        try:
            with stream:
                stream.settimeout(self._limit_s)
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    stream.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
                self._answer(stream)
        except (TrainMoverError, OSError) as error:
            if not self._is_closed:
                log.warning("a snapshot's connection has failed: %s", error)
        finally:
            with self._lock:
                self._streams.discard(stream)

    def _answer(self, stream: socket.socket) -> None:
        secret = self._secret()
        if secret is None:
            raise RemoteProtocolError("somebody asks for snapshots before this agent has a job")
        wire = Wire(stream, secret, is_client=False)
        message = wire.receive_any()
        try:
            match message:
                case FetchImage():
                    self._hand_out(wire, message)
                case StoreImage():
                    self._keep(wire, message)
                case LookAtDisk() | ReadFile() | CheckFiles():
                    answer_about_disks(wire, message, self._disks)
                case _:
                    raise RemoteProtocolError(f"{type(message).__name__} is no request")
        except StateMismatch as error:
            wire.send(Refusal(reason=str(error)))

    def _hand_out(self, wire: Wire, request: FetchImage) -> None:
        with self._store.reading(request.rank, request.version) as kept:
            description = kept.description
            wire.send(
                ImageFollows(
                    description=encode_description(description),
                    bulk_bytes=description.bulk_bytes,
                    bulk_digest=kept.bulk_digest,
                )
            )
            send_whole(wire, kept.bulk(), kept)

    def _keep(self, wire: Wire, request: StoreImage) -> None:
        if not 0 < request.size_bytes <= IMAGE_LIMIT_BYTES:
            raise RemoteProtocolError(f"a snapshot of {request.size_bytes} bytes was announced")
        is_wanted = self._store.is_wanted(request.rank, request.version)
        if not is_wanted:
            wire.send(Wanted(is_wanted=False))
            return
        memory = self._store.reserve(request.size_bytes)
        try:
            wire.send(Wanted(is_wanted=True))
            self._receive(wire, memoryview(memory)[: request.size_bytes])
            kept = self._store.add_peer(memory, request.bulk_digest)
        except BaseException:
            self._store.give_back(memory)
            raise
        log.info("keeps a copy of rank %d at step %d", kept.rank, kept.version.step)
        wire.send(Kept())
        self._on_stored()

    @staticmethod
    def _receive(wire: Wire, view: memoryview) -> None:
        digest = xxhash.xxh3_64()
        for start in range(0, len(view), CHUNK_BYTES):
            part = view[start : start + CHUNK_BYTES]
            wire.receive_into(part)
            digest.update(part)
        end = wire.receive(EndOfBytes)
        if not end.is_whole:
            raise StateMismatch("the copy was overwritten at its source while it was sent")
        if end.digest != digest.intdigest() & DIGEST_MASK:
            raise StateMismatch("the copy was damaged on the way")


def _shut(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # not connected any more
