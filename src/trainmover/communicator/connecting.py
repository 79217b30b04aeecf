"""Sockets on their way to becoming channels: non-blocking connect and handshake.

Decides nothing about who may connect: the gatekeeper (mesh.py) does. Every socket here has a
deadline; one that does not prove itself in time is closed. Runs on the I/O thread.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Protocol

from trainmover.communicator import handshake as hs
from trainmover.communicator import shared_memory
from trainmover.communicator.engine import Engine
from trainmover.communicator.settings import ChannelIdentity, CommunicatorConfig
from trainmover.errors import ProtocolError, RemoteProtocolError, TransportError
from trainmover.protocol.addresses import is_ipv6


class Gatekeeper(Protocol):
    """Who is let in; called on the I/O thread."""

    def refusal(self, hello: hs.Hello) -> hs.Refusal | None:
        """Why this caller is not welcome, or None."""


class Credentials:
    """What a handshake needs to know of this process."""

    def __init__(
        self, identity: ChannelIdentity, secret: bytes, config: CommunicatorConfig
    ) -> None:
        self.identity = identity
        self.secret = secret
        self.config = config

    def offer(self, peer_machine: str, purpose: str) -> shared_memory.Offer | None:
        """A ring for a channel between workers of one machine."""
        if not self.config.use_shared_memory or purpose != hs.PURPOSE_CHANNEL:
            return None
        if peer_machine != self.identity.machine:
            return None
        return shared_memory.Offer(self.config.shared_memory_bytes)

    def hello(self, peer: str, generation: int, purpose: str, ring: str) -> hs.Hello:
        """First message of a dialler."""
        return hs.Hello(
            job=self.identity.job,
            generation=generation,
            dialler=self.identity.incarnation,
            acceptor=peer,
            machine=self.identity.machine,
            purpose=purpose,
            nonce=os.urandom(hs.NONCE_BYTES),
            ring=ring,
        )


class _Shaking:
    """Non-blocking exchange of handshake messages on one socket."""

    def __init__(self, engine: Engine, sock: socket.socket, timeout_s: float) -> None:
        self._engine = engine
        self._socket = sock
        self._fd = sock.fileno()
        self._buffer = b""
        self._needed = hs.LENGTH.size
        self._is_body = False
        self._timer = engine.call_later(timeout_s, self._expire)
        self.is_over = False

    def _expire(self) -> None:
        self.end("no answer before the deadline")

    def end(self, reason: str) -> None:
        """Give up: close the socket."""
        if self.is_over:
            return
        self._detach()
        self._socket.close()
        self._failed(reason, None)

    def close_in_child(self) -> None:
        """Drop the descriptor in a forked child."""
        self._socket.close()

    def _detach(self) -> None:
        self.is_over = True
        self._timer.cancel()
        self._engine.unwatch(self._fd)

    def _write(self, message: hs.Message) -> None:
        data = hs.encode(message)
        if self._socket.send(data) != len(data):  # a few hundred bytes into an empty buffer
            raise TransportError("the handshake's socket takes no data")

    def _on_readable(self) -> None:
        try:
            while not self.is_over and self._fill():
                self._turn()
        except BlockingIOError:
            return
        except OSError as error:
            self.end(f"connection lost: {error.strerror or error}")
        except (ProtocolError, TransportError) as error:
            self.end(str(error))

    def _fill(self) -> bool:
        """Exactly the next message is read: what follows it belongs to the channel."""
        data = self._socket.recv(self._needed - len(self._buffer))
        if not data:
            raise TransportError("closed by the peer")
        self._buffer += data
        return len(self._buffer) == self._needed

    def _turn(self) -> None:
        buffer, self._buffer = self._buffer, b""
        self._is_body = not self._is_body
        if self._is_body:
            self._needed = hs.body_length(buffer)
            return
        self._needed = hs.LENGTH.size
        self._message(hs.decode(buffer))

    def _message(self, message: hs.Message) -> None:
        raise NotImplementedError

    def _failed(self, reason: str, refusal: hs.Refusal | None) -> None:
        raise NotImplementedError


class Dialling(_Shaking):
    """This side connects."""

    def __init__(
        self,
        engine: Engine,
        credentials: Credentials,
        target: DialTarget,
        on_open: Callable[[socket.socket, shared_memory.RingPair | None], None],
        on_failed: Callable[[str, hs.Refusal | None], None],
    ) -> None:
        family = socket.AF_INET6 if is_ipv6(target.host) else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        super().__init__(engine, sock, credentials.config.handshake_timeout_s)
        self._credentials = credentials
        self._on_open = on_open
        self._on_failed = on_failed
        self._offer = credentials.offer(target.machine, target.purpose)
        ring = self._offer.path if self._offer is not None else ""
        self._hello = credentials.hello(target.peer, target.generation, target.purpose, ring)
        self._pair: shared_memory.RingPair | None = None
        self._is_connected = False
        code = sock.connect_ex((target.host, target.port))
        if code not in (0, errno.EINPROGRESS):
            engine.submit(lambda: self.end(os.strerror(code)))
            return
        engine.watch(self._fd, self._on_readable, self._on_connected, want_write=True)

    def _on_connected(self) -> None:
        if self._is_connected or self.is_over:
            return
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.end(os.strerror(code))
            return
        self._is_connected = True
        self._engine.modify(self._fd, False)
        try:
            self._write(self._hello)
        except (OSError, TransportError) as error:
            self.end(str(error))

    def _message(self, message: hs.Message) -> None:
        if isinstance(message, hs.Refusal):
            self._detach()
            self._socket.close()
            self._failed(message.reason, message)
        elif isinstance(message, hs.Challenge):
            self._answer(message)
        elif isinstance(message, hs.Welcome):
            self._detach()
            pair = self._pair if message.has_ring else None
            self._drop_offer()
            self._on_open(self._socket, pair)
        else:
            raise RemoteProtocolError(f"unexpected {type(message).__name__} from the acceptor")

    def _answer(self, challenge: hs.Challenge) -> None:
        check_challenge(self._credentials.secret, self._hello, challenge)
        if challenge.ring and self._offer is not None:
            try:
                size = self._credentials.config.shared_memory_bytes
                into = shared_memory.take(challenge.ring, size)
                self._pair = shared_memory.RingPair(self._offer.ring, into)
            except TransportError:
                self._pair = None  # another mount or pid namespace: the socket serves as well
        proof = hs.prove(self._credentials.secret, "dialler", self._hello, challenge.nonce)
        self._write(hs.Proof(proof=proof, has_ring=self._pair is not None))

    def _drop_offer(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    def _failed(self, reason: str, refusal: hs.Refusal | None) -> None:
        self._drop_offer()
        self._on_failed(reason, refusal)


class DialTarget:
    """Whom to dial, for what."""

    __slots__ = ("peer", "machine", "host", "port", "generation", "purpose")

    def __init__(
        self, peer: str, machine: str, address: tuple[str, int], generation: int, purpose: str
    ) -> None:
        self.peer = peer
        self.machine = machine
        self.host, self.port = address
        self.generation = generation
        self.purpose = purpose


def check_challenge(secret: bytes, hello: hs.Hello, challenge: hs.Challenge) -> None:
    """The acceptor must know the secret, too."""
    expected = hs.prove(secret, "acceptor" + challenge.ring, hello, challenge.nonce)
    if not hs.is_proof(expected, challenge.proof):
        raise RemoteProtocolError(f"{hello.acceptor} does not know the job's secret")


class Accepting(_Shaking):
    """The other side connected."""

    def __init__(
        self,
        engine: Engine,
        credentials: Credentials,
        gatekeeper: Gatekeeper,
        sock: socket.socket,
        on_open: Callable[[socket.socket, hs.Hello, shared_memory.RingPair | None], None],
    ) -> None:
        sock.setblocking(False)
        super().__init__(engine, sock, credentials.config.handshake_timeout_s)
        self._credentials = credentials
        self._gatekeeper = gatekeeper
        self._on_open = on_open
        self._hello: hs.Hello | None = None
        self._nonce = os.urandom(hs.NONCE_BYTES)
        self._offer: shared_memory.Offer | None = None
        self.on_over: Callable[[], None] | None = None
        engine.watch(self._fd, self._on_readable)

    def _message(self, message: hs.Message) -> None:
        if isinstance(message, hs.Hello) and self._hello is None:
            self._challenge(message)
        elif isinstance(message, hs.Proof) and self._hello is not None:
            self._judge(self._hello, message)
        else:
            raise RemoteProtocolError(f"unexpected {type(message).__name__} from the dialler")

    def _challenge(self, hello: hs.Hello) -> None:
        self._hello = hello
        refusal = self._gatekeeper.refusal(hello)
        if refusal is not None:
            self._refuse(refusal)
            return
        if hello.ring:
            self._offer = self._credentials.offer(hello.machine, hello.purpose)
        ring = self._offer.path if self._offer is not None else ""
        proof = hs.prove(self._credentials.secret, "acceptor" + ring, hello, self._nonce)
        self._write(hs.Challenge(nonce=self._nonce, proof=proof, ring=ring))

    def _judge(self, hello: hs.Hello, message: hs.Proof) -> None:
        expected = hs.prove(self._credentials.secret, "dialler", hello, self._nonce)
        if not hs.is_proof(expected, message.proof):
            self._refuse(hs.Refusal(code="secret", reason="you do not know the job's secret"))
            return
        refusal = self._gatekeeper.refusal(hello)  # the world may have moved since the hello
        if refusal is not None:
            self._refuse(refusal)
            return
        pair = self._pair(hello) if message.has_ring else None
        self._write(hs.Welcome(has_ring=pair is not None))
        self._detach()
        self._drop_offer()
        if self.on_over is not None:
            self.on_over()
        self._on_open(self._socket, hello, pair)

    def _pair(self, hello: hs.Hello) -> shared_memory.RingPair | None:
        if self._offer is None:
            return None
        try:
            into = shared_memory.take(hello.ring, self._credentials.config.shared_memory_bytes)
        except TransportError:
            return None  # another mount or pid namespace: the socket serves as well
        return shared_memory.RingPair(self._offer.ring, into)

    def _refuse(self, refusal: hs.Refusal) -> None:
        self._write(refusal)
        self.end(refusal.reason)

    def _drop_offer(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None

    def _failed(self, reason: str, refusal: hs.Refusal | None) -> None:
        self._drop_offer()
        if self.on_over is not None:
            self.on_over()
