"""Raw authenticated streams between two workers, for the transfer of state.

Blocking, on the caller's thread; the handshake is the one of channels, with another purpose.
Decides nothing about what travels in the stream.
"""

from __future__ import annotations

import socket
import time

from trainmover.communicator import handshake as hs
from trainmover.communicator.connecting import Credentials, check_challenge
from trainmover.errors import (
    AuthenticationFailed,
    ConnectTimeout,
    GenerationMismatch,
    ProtocolError,
    TransportError,
)
from trainmover.topology import Member


def _receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise TransportError("closed by the peer during the handshake")
        data += piece
    return data


def _message(sock: socket.socket) -> hs.Message:
    return hs.decode(_receive(sock, hs.body_length(_receive(sock, hs.LENGTH.size))))


def _shake(sock: socket.socket, credentials: Credentials, hello: hs.Hello) -> None:
    sock.sendall(hs.encode(hello))
    message = _message(sock)
    if isinstance(message, hs.Challenge):
        try:
            check_challenge(credentials.secret, hello, message)
        except ProtocolError as error:
            raise AuthenticationFailed(str(error)) from error
        proof = hs.prove(credentials.secret, "dialler", hello, message.nonce)
        sock.sendall(hs.encode(hs.Proof(proof=proof, has_ring=False)))
        message = _message(sock)
    if isinstance(message, hs.Welcome):
        return
    if not isinstance(message, hs.Refusal):
        raise TransportError(f"unexpected {type(message).__name__} from {hello.acceptor}")
    if message.code == "secret":
        raise AuthenticationFailed(f"{hello.acceptor} refused: {message.reason}")
    if message.code == "generation":
        raise GenerationMismatch(f"{hello.acceptor} refused: {message.reason}")
    raise TransportError(f"{hello.acceptor} refused: {message.reason}")


def dial(
    credentials: Credentials, member: Member, purpose: str, generation: int, timeout_s: float
) -> socket.socket:
    """A blocking stream to `member`, whose worker is told of it by `stream_accepted`.

    Called on: any thread but the I/O thread.
    Blocks: up to `timeout_s`, retries of a refused connection included.

    Raises:
        ConnectTimeout: Nobody answered in time.
        GenerationMismatch: The peer is in another generation.
        AuthenticationFailed: One side does not know the job's secret.
        TransportError: The connection was lost or refused for another reason.
    """
    deadline = time.monotonic() + timeout_s
    hello = credentials.hello(member.incarnation, generation, purpose, "")
    delay_s = 0.02
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ConnectTimeout(f"{member.incarnation} did not answer within {timeout_s} s")
        try:
            sock = socket.create_connection((member.host, member.port), timeout=left_s)
        except ConnectionRefusedError:
            time.sleep(min(delay_s, max(0.0, left_s)))
            delay_s = min(2 * delay_s, 0.25)
            continue
        except OSError as error:
            raise ConnectTimeout(f"{member.incarnation} can't be reached: {error}") from error
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _shake(sock, credentials, hello)
        except TimeoutError as error:
            sock.close()
            raise ConnectTimeout(f"{member.incarnation} went silent in the handshake") from error
        except OSError as error:
            sock.close()
            raise TransportError(f"{member.incarnation} went away: {error}") from error
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        return sock
