"""Client's end: look at another machine's own disk, read from it, have it compared with checksums.

One connection is kept and made anew where the other end has let go of it. Each wait is bounded by
the holder's limit, and there is one such wait in all: an agent that has given no answer within it,
or is not there, is not asked again. Raises TransportError, RemoteProtocolError.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from trainmover.edges.errand import Errand
from trainmover.edges.snapshot_client import Holder, connect
from trainmover.edges.snapshot_wire import (
    BytesFollow,
    CheckFiles,
    CheckpointOnDisk,
    DiskSeen,
    Enough,
    FilesChecked,
    LookAtDisk,
    ReadFile,
    Refusal,
    StillChecking,
    Wire,
    WireMessage,
)
from trainmover.errors import RemoteProtocolError, TransportError

PART_BYTES: Final = 8 << 20
"""Asked for at once."""


class DiskClient:
    """One agent's disk; used by several threads in turn, for one choice or one load.

    Args:
        holder: Where the agent is.
        errand: With its end all that is asked here ends; by default `close` ends it.
    """

    def __init__(self, holder: Holder, errand: Errand | None = None) -> None:
        self.holder = holder
        self._errand = errand or Errand("a disk", holder.limit_s)
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._lost = ""
        """Why the agent is not asked any more."""

    def look(self) -> tuple[CheckpointOnDisk, ...]:
        """Every checkpoint there."""
        with self._lock:
            answer = self._ask(LookAtDisk())
            if not isinstance(answer, DiskSeen):
                raise self._unexpected(answer)
            return answer.found

    def read(self, folder: str, path: str, position: int, into: memoryview) -> int:
        """Fill `into`; the count of bytes, smaller at the end of the file."""
        done = 0
        with self._lock:
            while done < len(into):
                part = into[done : done + PART_BYTES]
                count = self._read(folder, path, position + done, part)
                done += count
                if count < len(part):
                    break
        return done

    def _read(self, folder: str, path: str, position: int, part: memoryview) -> int:
        request = ReadFile(folder=folder, path=path, position=position, count=len(part))
        answer = self._ask(request)
        if not isinstance(answer, BytesFollow) or not 0 <= answer.count <= len(part):
            raise self._unexpected(answer)
        assert self._wire is not None
        try:
            self._wire.receive_into(part[: answer.count])
        except TransportError as error:
            self._lose(error)
            raise
        return answer.count

    def check(
        self, folder: str, name: str, paths: tuple[str, ...], moved: Callable[[int], None]
    ) -> tuple[tuple[str, str], ...]:
        """Files that differ from their checksums, with the reason; `moved`: told of progress."""
        with self._lock:
            answer = self._ask(CheckFiles(folder=folder, name=name, paths=paths))
            while isinstance(answer, StillChecking):
                moved(answer.byte_count)
                answer = self._hear()
            if not isinstance(answer, FilesChecked):
                raise self._unexpected(answer)
            return answer.damages

    def close(self) -> None:
        """End the connection, and whatever another thread still waits for on it. At once."""
        if self._lock.acquire(blocking=False):
            try:
                self._take_leave()
            finally:
                self._lock.release()
        self._errand.end()

    def _take_leave(self) -> None:
        if self._wire is not None:
            try:
                self._wire.send(Enough())
            except TransportError:
                pass  # it is gone already
        self._drop()

    def _ask(self, request: WireMessage) -> WireMessage:
        """The answer; once more over a new connection where the kept one has gone."""
        if self._lost:
            raise TransportError(self._lost)
        if self._wire is not None:
            try:
                return self._say(self._wire, request)
            except TransportError as error:
                self._lose(error)
                if self._lost:
                    raise
        try:
            self._wire = connect(self.holder, self._errand)
            return self._say(self._wire, request)
        except TransportError as error:
            self._drop()
            self._lost = str(error)
            raise

    def _say(self, wire: Wire, request: WireMessage) -> WireMessage:
        wire.send(request)
        return self._hear()

    def _hear(self) -> WireMessage:
        assert self._wire is not None
        try:
            answer = self._wire.receive_any()
        except TransportError as error:
            self._lose(error)
            raise
        except RemoteProtocolError:
            self._drop()
            raise
        if isinstance(answer, Refusal):
            raise RemoteProtocolError(answer.reason)
        return answer

    def _unexpected(self, answer: WireMessage) -> RemoteProtocolError:
        self._drop()
        return RemoteProtocolError(f"{type(answer).__name__} answers another question about a disk")

    def _lose(self, error: TransportError) -> None:
        """A connection has failed: one that was closed can be made anew, a silent agent is lost."""
        self._drop()
        if isinstance(error.__cause__, TimeoutError):
            self._lost = str(error)

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.stream.close()
            self._wire = None
