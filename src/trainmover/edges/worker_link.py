"""Agent's end of the workers' unix socket.

Decides who may speak: a process of this user whose pid is the one the nursery forked for that
incarnation, as the kernel says (SO_PEERCRED). Messages pass unchanged in both directions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from trainmover.errors import ProtocolError, RemoteProtocolError
from trainmover.protocol import codec
from trainmover.protocol.messages import FromWorkerBody, ToWorkerBody
from trainmover.protocol.nursery import LENGTH_BYTES, MAX_FRAME_BYTES, decode_hello, frame

log = logging.getLogger(__name__)

HELLO_LIMIT_S = 5.0
MAX_BUFFERED_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class WorkerLinkHandlers:
    """Whom to tell; called on the event loop, must not block."""

    pid_of: Callable[[str], Awaitable[int | None]]
    """Pid the nursery has given for an incarnation; waits a little for a fork just under way."""
    on_linked: Callable[[str], None]
    on_unlinked: Callable[[str], None]
    on_message: Callable[[str, FromWorkerBody], None]


class WorkerLinkServer:
    """Accepts workers on `path` until closed."""

    def __init__(self, path: str, handlers: WorkerLinkHandlers) -> None:
        self._path = path
        self._handlers = handlers
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen; a socket file left by an earlier agent is replaced."""
        Path(self._path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(self._path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        os.chmod(self._path, 0o600)

    async def close(self) -> None:
        """Close all workers' connections and the socket."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers.values()):
            writer.close()
        Path(self._path).unlink(missing_ok=True)

    def is_linked(self, incarnation: str) -> bool:
        """Whether the worker's connection is open, or not read to its end."""
        return incarnation in self._writers

    def send(self, incarnation: str, body: ToWorkerBody) -> bool:
        """Hand `body` to the worker; False when it has no connection at present."""
        writer = self._writers.get(incarnation)
        if writer is None or writer.is_closing():
            return False
        if writer.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            log.warning("worker %s does not read: its connection is closed", incarnation)
            writer.transport.abort()
            return False
        writer.write(frame(body))
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incarnation = ""
        try:
            async with asyncio.timeout(HELLO_LIMIT_S):
                incarnation = await self._check_hello(reader, writer)
            before = self._writers.get(incarnation)
            if before is not None:
                before.close()
            self._writers[incarnation] = writer
            self._handlers.on_linked(incarnation)
            while True:
                body = codec.decode_from_worker(await _read_frame(reader))
                self._handlers.on_message(incarnation, body)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            log.info("worker %s closed its connection: %s", incarnation or "?", error)
        except (ProtocolError, TimeoutError) as error:
            log.warning("worker %s is cut off: %s", incarnation or "?", error or "no hello in time")
        finally:
            writer.close()
            if incarnation and self._writers.get(incarnation) is writer:
                del self._writers[incarnation]
                self._handlers.on_unlinked(incarnation)

    async def _check_hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        hello = decode_hello(await _read_frame(reader))
        end: socket.socket = writer.get_extra_info("socket")
        pid, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        expected = await self._handlers.pid_of(hello.incarnation)
        if uid != os.getuid() or expected != pid or hello.pid != pid:
            raise RemoteProtocolError(
                f"expected pid {expected} of user {os.getuid()} as {hello.incarnation}, "
                f"got pid {pid} of user {uid}"
            )
        return hello.incarnation


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"expected a frame of at most {MAX_FRAME_BYTES}, got {length}")
    return await reader.readexactly(length)
