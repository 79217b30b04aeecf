"""All channels of this process, by the incarnation at their other end.

Decides who may connect (job, generation, incarnation), when a missing channel is dialled again
and what happens to one that arrives before its generation is known here. Only the lower rank of
a pair ever opens a channel; the higher one may knock, which asks the lower to do so. Runs on the
I/O thread, state under the engine's lock.
"""

from __future__ import annotations

import itertools
import socket
import time
from typing import Protocol

from trainmover.communicator import handshake as hs
from trainmover.communicator.channel import Channel, ChannelOwner
from trainmover.communicator.connecting import Accepting, Credentials, Dialling, DialTarget
from trainmover.communicator.engine import Engine
from trainmover.communicator.shared_memory import RingPair
from trainmover.protocol.addresses import is_ipv6
from trainmover.topology import Member

_RETRY_S = 0.02
_RETRY_MAX_S = 0.25
_BACKLOG = 256
_PENDING_LIMIT = 1024


class MeshOwner(ChannelOwner, Protocol):
    """What the mesh asks of the communicator."""

    def generation_refusal(self, hello: hs.Hello) -> str | None:
        """Why a generation or incarnation is not welcome; under the lock."""

    def established(self, channel: Channel) -> None:
        """A channel is open; under the lock."""

    def connect_failed(self, peer: str, generation: int, reason: str) -> None:
        """A channel could not be opened in time; under the lock."""

    def knocked(self, peer: str, generation: int) -> None:
        """A higher rank asks for a channel; under the lock."""

    def stream(self, purpose: str, generation: int, peer: str, stream: socket.socket) -> None:
        """A raw stream was dialled; no lock held."""


class _Attempt:
    """Repeated dialling of one peer until a deadline."""

    def __init__(self, mesh: Mesh, member: Member, generation: int, purpose: str) -> None:
        self.member = member
        self.generation = generation
        self.purpose = purpose
        self.is_over = False
        self.dialling: Dialling | None = None
        self._mesh = mesh
        self._delay_s = _RETRY_S
        self._deadline = time.monotonic() + mesh.credentials.config.connect_timeout_s

    def go(self) -> None:
        """Dial once."""
        if self.is_over:
            return
        member = self.member
        target = DialTarget(
            member.incarnation,
            member.machine,
            (member.host, member.port),
            self.generation,
            self.purpose,
        )
        mesh = self._mesh
        self.dialling = Dialling(mesh.engine, mesh.credentials, target, self._opened, self._failed)

    def _opened(self, sock: socket.socket, pair: RingPair | None) -> None:
        if self.is_over:
            sock.close()
            return
        self.is_over = True
        if self.purpose == hs.PURPOSE_KNOCK:
            self._mesh.attempt_over(self)
            sock.close()
            return
        self._mesh.opened(self, sock, pair)

    def _failed(self, reason: str, refusal: hs.Refusal | None) -> None:
        if self.is_over:
            return
        is_final = refusal is not None and refusal.code not in ("busy", "unready")
        if is_final or time.monotonic() + self._delay_s > self._deadline:
            self.is_over = True
            self._mesh.attempt_failed(self, reason)
            return
        self._mesh.engine.call_later(self._delay_s, self.go)
        self._delay_s = min(2 * self._delay_s, _RETRY_MAX_S)


class Mesh:
    """Listener, attempts and open channels."""

    def __init__(
        self, engine: Engine, credentials: Credentials, owner: MeshOwner, bind_host: str
    ) -> None:
        self.engine = engine
        self.credentials = credentials
        self.channels: dict[str, Channel] = {}
        self.opened_total = 0
        self.closed_total = 0
        self.totals_of_closed = (0, 0, 0)
        """Bytes in, bytes out, frames out of channels that are closed."""
        self._owner = owner
        self._ids = itertools.count(1)
        self._attempts: dict[tuple[str, str], _Attempt] = {}
        self._pending: set[Accepting] = set()
        family = socket.AF_INET6 if is_ipv6(bind_host) else socket.AF_INET
        self._listener = socket.create_server((bind_host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        engine.submit(self._listen)

    def _listen(self) -> None:
        self.engine.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            if len(self._pending) >= _PENDING_LIMIT:
                sock.close()
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepting = Accepting(self.engine, self.credentials, self, sock, self._accepted)
            self._pending.add(accepting)
            accepting.on_over = lambda it=accepting: self._pending.discard(it)

    # -- gatekeeper ----------------------------------------------------------

    def refusal(self, hello: hs.Hello) -> hs.Refusal | None:
        """Why `hello` is not welcome here, or None."""
        own = self.credentials.identity
        if hello.job != own.job:
            return hs.Refusal(code="identity", reason=f"this is job {own.job}, not {hello.job}")
        if hello.acceptor != own.incarnation:
            reason = f"this is {own.incarnation}, not {hello.acceptor}"
            return hs.Refusal(code="identity", reason=reason)
        with self.engine.lock:
            reason_ = self._owner.generation_refusal(hello)
            if reason_ is not None:
                return hs.Refusal(code="generation", reason=reason_)
            existing = self.channels.get(hello.dialler)
            is_channel = hello.purpose == hs.PURPOSE_CHANNEL
            if is_channel and existing is not None and existing.opened_for >= hello.generation:
                return hs.Refusal(code="busy", reason="there is a channel already")
        return None

    def _accepted(self, sock: socket.socket, hello: hs.Hello, pair: RingPair | None) -> None:
        if hello.purpose == hs.PURPOSE_KNOCK:
            sock.close()
            with self.engine.lock:
                self._owner.knocked(hello.dialler, hello.generation)
        elif hello.purpose == hs.PURPOSE_CHANNEL:
            self._establish(sock, hello.dialler, hello.generation, pair)
        else:
            sock.setblocking(True)
            self._owner.stream(hello.purpose, hello.generation, hello.dialler, sock)
        self._owner.drain()

    # -- opening -------------------------------------------------------------

    def connect(self, member: Member, generation: int, purpose: str = hs.PURPOSE_CHANNEL) -> None:
        """Open a channel to `member` (or knock), with retries; any thread, under the lock."""
        key = (member.incarnation, purpose)
        running = self._attempts.get(key)
        if running is not None and running.generation >= generation:
            return
        if running is not None:
            running.is_over = True
        attempt = _Attempt(self, member, generation, purpose)
        self._attempts[key] = attempt
        self.engine.submit(attempt.go)

    def attempt_over(self, attempt: _Attempt) -> None:
        """An attempt has ended, well or not."""
        with self.engine.lock:
            key = (attempt.member.incarnation, attempt.purpose)
            if self._attempts.get(key) is attempt:
                del self._attempts[key]

    def opened(self, attempt: _Attempt, sock: socket.socket, pair: RingPair | None) -> None:
        """A dialled connection is authenticated."""
        self.attempt_over(attempt)
        self._establish(sock, attempt.member.incarnation, attempt.generation, pair)
        self._owner.drain()

    def attempt_failed(self, attempt: _Attempt, reason: str) -> None:
        """A peer could not be reached before the deadline."""
        self.attempt_over(attempt)
        with self.engine.lock:
            self._owner.connect_failed(attempt.member.incarnation, attempt.generation, reason)
        self._owner.drain()

    def _establish(
        self, sock: socket.socket, peer: str, generation: int, pair: RingPair | None
    ) -> None:
        self._tune(sock)
        with self.engine.lock:
            old = self.channels.get(peer)
            if old is not None:  # the peer has given it up before we noticed
                old.fail("replaced by a newer connection of the same peer")
            config = self.credentials.config
            channel = Channel(self.engine, self._owner, sock, peer, generation, config)
            channel.id = next(self._ids)
            channel.out.ring = pair
            channel.opened_at = self.opened_total
            self.opened_total += 1
            self.channels[peer] = channel
            channel.start()
            self._owner.established(channel)

    def _tune(self, sock: socket.socket) -> None:
        config = self.credentials.config
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if config.socket_buffer_bytes > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.socket_buffer_bytes)
        if config.tcp_user_timeout_s > 0:
            milliseconds = round(config.tcp_user_timeout_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if config.keepalive_s > 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            idle = max(1, round(config.keepalive_s))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, idle // 3))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    # -- closing -------------------------------------------------------------

    def forget(self, channel: Channel) -> None:
        """A channel is closed, by whomever."""
        if self.channels.get(channel.peer) is channel:
            del self.channels[channel.peer]
        self.closed_total += 1
        bytes_in, bytes_out, frames_out = self.totals_of_closed
        self.totals_of_closed = (
            bytes_in + channel.bytes_in,
            bytes_out + channel.out.bytes_out,
            frames_out + channel.out.frames_out,
        )

    def close_channel(self, channel: Channel) -> None:
        """Close a channel on purpose."""
        if not channel.is_closed:
            channel.close()
            self.forget(channel)

    def give_up(self, incarnation: str) -> None:
        """Dial a peer no more."""
        for purpose in (hs.PURPOSE_CHANNEL, hs.PURPOSE_KNOCK):
            attempt = self._attempts.pop((incarnation, purpose), None)
            if attempt is not None:
                attempt.is_over = True

    def close(self) -> None:
        """Close everything; on the I/O thread, under the lock."""
        for attempt in self._attempts.values():
            attempt.is_over = True
        self._attempts.clear()
        for accepting in list(self._pending):
            accepting.end("closing")
        for channel in list(self.channels.values()):
            self.close_channel(channel)
        if self._listener.fileno() >= 0:
            self.engine.unwatch(self._listener.fileno())
            self._listener.close()

    def close_in_child(self) -> None:
        """Drop all descriptors in a forked child."""
        for channel in self.channels.values():
            channel.close_in_child()
        for accepting in self._pending:
            accepting.close_in_child()
        for attempt in self._attempts.values():
            if attempt.dialling is not None:
                attempt.dialling.close_in_child()
        self._listener.close()
