"""What an agent, its nursery and the forked workers say to each other on one machine.

The nursery is a warm, single-threaded process that has imported torch; every worker of its machine
is a fork of it. It outlives its agent: a restarted agent connects again and is told what lives and
what ended meanwhile. Frames on both unix sockets are a 4-byte big-endian length and msgpack.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from trainmover.errors import RemoteProtocolError
from trainmover.protocol.messages import JobSpec, Message

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
LENGTH_BYTES: Final = 4

T = TypeVar("T")


class ForkRequest(Message, frozen=True):
    """One worker to fork; idempotent by incarnation."""

    incarnation: str
    local_rank: int
    machine: str
    host: str
    """Address of this machine that the worker's channels listen on."""
    spec: JobSpec
    agent_socket: str
    """Unix socket of the agent; the worker reconnects to it for as long as it lives."""
    secret: bytes
    """The job's secret: channel handshakes between workers are authenticated with it."""
    progress_path: str
    """File of `progress_page.PAGE_BYTES`, made and initialised by the agent; map it shared."""
    log_path: str
    """Standard output and error are appended here (done before `run_worker`)."""
    environment: tuple[tuple[str, str], ...] = ()
    """The whole environment of the worker (done before `run_worker`)."""


class KillGroup(Message, frozen=True):
    """SIGKILL the worker's process group; answer: `Exited`."""

    incarnation: str


class EndNursery(Message, frozen=True):
    """End: SIGTERM to all workers, SIGKILL after `grace_s`, then exit."""

    grace_s: float = 0.0


class ForkedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that the nursery has forked and not yet reaped."""

    incarnation: str
    local_rank: int
    pid: int


class NurseryUp(Message, frozen=True):
    """First frame to each agent that connects: warm, and what lives here."""

    pid: int
    workers: tuple[ForkedWorker, ...] = ()
    warm_seconds: float = 0.0
    thread_count: int = 1
    """Threads right before serving; with more than one, workers are started by fork and exec."""


class Forked(Message, frozen=True):
    """The process exists."""

    incarnation: str
    local_rank: int
    pid: int


class ForkFailed(Message, frozen=True):
    """The process could not be started."""

    incarnation: str
    reason: str


class Exited(Message, frozen=True):
    """Ended and reaped; its whole process group is dead. Repeated to an agent that reconnects."""

    incarnation: str
    pid: int
    exit_code: int | None
    signal: int | None


class WorkerHello(Message, frozen=True):
    """First frame of a worker on its agent's socket, and again after each reconnection.

    After it the worker sends `FromWorkerBody` and receives `ToWorkerBody`, unwrapped.
    """

    incarnation: str
    pid: int


ToNursery = ForkRequest | KillGroup | EndNursery
FromNursery = NurseryUp | Forked | ForkFailed | Exited

_to_nursery = msgspec.msgpack.Decoder(ToNursery)
_from_nursery = msgspec.msgpack.Decoder(FromNursery)
_hello = msgspec.msgpack.Decoder(WorkerHello)
_request = msgspec.msgpack.Decoder(ForkRequest)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """Length and bytes of one message."""
    data = _encoder.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies of all frames complete so far. Raises RemoteProtocolError on an absurd length."""
        self._data += data
        bodies = []
        while len(self._data) >= LENGTH_BYTES:
            length = int.from_bytes(self._data[:LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                text = f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got {length}"
                raise RemoteProtocolError(text)
            if len(self._data) < LENGTH_BYTES + length:
                break
            bodies.append(bytes(self._data[LENGTH_BYTES : LENGTH_BYTES + length]))
            del self._data[: LENGTH_BYTES + length]
        return bodies


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, sender: str) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        text = f"expected a message of this version from {sender}, got {len(data)} bytes: {error}"
        raise RemoteProtocolError(text) from error


def decode_to_nursery(data: bytes) -> ToNursery:
    """What an agent sent to its nursery. Raises RemoteProtocolError."""
    return _decode(_to_nursery, data, "the agent")


def decode_from_nursery(data: bytes) -> FromNursery:
    """What a nursery sent to its agent. Raises RemoteProtocolError."""
    return _decode(_from_nursery, data, "the nursery")


def decode_hello(data: bytes) -> WorkerHello:
    """First frame of a worker. Raises RemoteProtocolError."""
    return _decode(_hello, data, "a worker")


def decode_request(data: bytes) -> ForkRequest:
    """A fork request that was handed to a process started by exec. Raises RemoteProtocolError."""
    return _decode(_request, data, "the nursery")
