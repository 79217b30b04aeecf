"""Raw authenticated streams between two workers, for the transfer of state.

Blocking, on the caller's thread; the handshake is the one of channels, with another purpose.
Decides nothing about what travels in the stream.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from trainmover.communicator import handshake as hs
from trainmover.communicator.connecting import Credentials, check_challenge
from trainmover.edges.errand import Errand
from trainmover.errors import (
    AuthenticationFailed,
    ConnectTimeout,
    GenerationMismatch,
    ProtocolError,
    TransportError,
)
from trainmover.topology import Member

REFUSED_S: Final = 1.0
"""A worker listens before its address is known: one that refuses for so long is no more."""


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
    credentials: Credentials, member: Member, purpose: str, generation: int, errand: Errand
) -> socket.socket:
    """A blocking stream to `member`, whose worker is told of it by `stream_accepted`.

    Called on: any thread but the I/O thread.
    Blocks: up to the errand's limit; `REFUSED_S` where nobody listens.

    Raises:
        ConnectTimeout: Nobody answered in time.
        GenerationMismatch: The peer is in another generation.
        AuthenticationFailed: One side does not know the job's secret.
        TransportError: The connection was lost or refused for another reason, or the errand is
            over.
    """
    hello = credentials.hello(member.incarnation, generation, purpose, "")
    sock = _connect(member, errand)
    try:
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
    return sock


def _connect(member: Member, errand: Errand) -> socket.socket:
    refused_until = time.monotonic() + min(REFUSED_S, errand.limit_s)
    delay_s = 0.02
    while True:
        try:
            return errand.connect(member.host, member.port)
        except ConnectionRefusedError as error:
            if time.monotonic() + delay_s >= refused_until:
                raise ConnectTimeout(f"{member.incarnation} listens no more: {error}") from error
        except OSError as error:
            raise ConnectTimeout(f"{member.incarnation} can't be reached: {error}") from error
        errand.check()
        time.sleep(delay_s)
        delay_s *= 2
