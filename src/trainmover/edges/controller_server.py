"""The controller's one port: WebSocket links of agents, JSON for operators.

Decides who may speak (whoever proves the token) and keeps one link per machine; what is said is
handed to the daemon unchanged. Nothing is answered before authentication but a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import psutil
from aiohttp import web

from trainmover.edges.seal import Seal, derive, is_equal, new_nonce, proof
from trainmover.errors import ConfigError, ProtocolError
from trainmover.protocol import codec, handshake
from trainmover.protocol.messages import FromAgentMessage, ToAgentMessage

log = logging.getLogger(__name__)

HANDSHAKE_LIMIT_S = 5.0
PING_S = 5.0
CLOSE_LIMIT_S = 1.0
"""For the end of all links together: an agent that is stopped takes nothing any more."""
MAX_QUEUED = 10_000
MAX_SESSIONS = 64


@dataclass(frozen=True, kw_only=True)
class ServerHandlers:
    """Whom to tell; the first three are called on the event loop and must not block."""

    on_linked: Callable[[str], None]
    on_unlinked: Callable[[str], None]
    on_message: Callable[[str, FromAgentMessage], None]
    answer: Callable[[str, str, dict[str, str], bytes], Awaitable[tuple[int, bytes]]]
    """Method, path below the operator's root, query, body -> status, JSON."""


@dataclass(kw_only=True)
class _Link:
    socket: web.WebSocketResponse
    seal: Seal
    outgoing: asyncio.Queue[ToAgentMessage] = field(
        default_factory=lambda: asyncio.Queue(MAX_QUEUED)
    )


@dataclass(kw_only=True)
class _Session:
    key: bytes
    counter: int = 0


class ControllerServer:
    """Listens until `close`; `send` to machines, events through the handlers."""

    def __init__(self, token: str, handlers: ServerHandlers) -> None:
        self._token = token
        self._handlers = handlers
        self._links: dict[str, _Link] = {}
        self._sessions: dict[str, _Session] = {}
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Bind. Raises ConfigError naming address, port and, if it can be found, its owner."""
        application = web.Application(client_max_size=codec.MAX_MESSAGE_BYTES)
        application.router.add_get(handshake.AGENT_PATH, self._serve_agent)
        application.router.add_post(f"{handshake.OPERATOR_PATH}/session", self._open_session)
        application.router.add_route("*", handshake.OPERATOR_PATH + "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"the controller can't listen on {host} port {port}: {error.strerror or error}"
                f"{owner_of(port)}; choose another port or stop the other process"
            ) from error
        self.port = int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Write what is queued (bounded), then close every link and the port."""
        for _ in range(100):
            if all(link.outgoing.empty() for link in self._links.values()):
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        closing = [asyncio.create_task(link.socket.close()) for link in self._links.values()]
        if closing:
            _, late = await asyncio.wait(closing, timeout=CLOSE_LIMIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def send(self, machine: str, message: ToAgentMessage) -> bool:
        """Queue `message`; False when the machine has no link at present (the message is lost)."""
        link = self._links.get(machine)
        if link is None:
            return False
        try:
            link.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("agent %s does not read: its link is closed", machine)
            self._drop(machine, link, handshake.CLOSE_TOO_SLOW)
            return False
        return True

    @property
    def machines(self) -> tuple[str, ...]:
        """Machines with a link, by name."""
        return tuple(sorted(self._links))

    # -------------------------------------------------------------------------- agents

    async def _serve_agent(self, request: web.Request) -> web.StreamResponse:
        response = web.WebSocketResponse(max_msg_size=codec.MAX_MESSAGE_BYTES, heartbeat=PING_S)
        await response.prepare(request)
        try:
            async with asyncio.timeout(HANDSHAKE_LIMIT_S):
                welcomed = await self._shake_hands(response, str(request.remote))
        except (TimeoutError, ProtocolError) as error:
            log.warning("no handshake with %s: %s", request.remote, error or "too slow")
            await response.close(code=handshake.CLOSE_PROTOCOL)
            return response
        if welcomed is None:
            return response
        machine, seal = welcomed
        before = self._links.get(machine)
        if before is not None:
            self._drop(machine, before, handshake.CLOSE_SUPERSEDED)
        link = _Link(socket=response, seal=seal)
        self._links[machine] = link
        self._handlers.on_linked(machine)
        writer = asyncio.create_task(self._write(link), name=f"link-writer-{machine}")
        try:
            await self._read(machine, link)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            if self._links.get(machine) is link:
                del self._links[machine]
                self._handlers.on_unlinked(machine)
        return response

    async def _shake_hands(
        self, response: web.WebSocketResponse, remote: str
    ) -> tuple[str, Seal] | None:
        nonce = new_nonce()
        challenge = handshake.Challenge(version=handshake.LINK_VERSION, nonce=nonce)
        await response.send_bytes(codec.encode(challenge))
        message = await response.receive()
        if message.type is not aiohttp.WSMsgType.BINARY:
            log.warning("%s closed the link during the handshake", remote)
            return None
        answer = handshake.decode_as(handshake.ChallengeAnswer, message.data, remote)
        parts = (nonce, answer.nonce, answer.machine.encode())
        if not is_equal(answer.proof, derive(self._token, "agent", *parts)):
            log.warning("agent '%s' at %s does not know the token", answer.machine, remote)
            await response.close(code=handshake.CLOSE_BAD_TOKEN)
            return None
        accepted = handshake.ChallengeAccepted(proof=derive(self._token, "controller", *parts))
        await response.send_bytes(codec.encode(accepted))
        key = derive(self._token, "link", *parts)
        return answer.machine, Seal(key, sends_as="controller", receives_from="agent")

    def _drop(self, machine: str, link: _Link, code: int) -> None:
        if self._links.get(machine) is link:
            del self._links[machine]
            self._handlers.on_unlinked(machine)
        task = asyncio.ensure_future(link.socket.close(code=code))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read(self, machine: str, link: _Link) -> None:
        async for message in link.socket:
            if message.type is not aiohttp.WSMsgType.BINARY or self._links.get(machine) is not link:
                return
            try:
                decoded = codec.decode_from_agent(link.seal.open(message.data))
            except ProtocolError as error:
                log.warning("agent %s: %s", machine, error)
                await link.socket.close(code=handshake.CLOSE_PROTOCOL)
                return
            self._handlers.on_message(machine, decoded)

    async def _write(self, link: _Link) -> None:
        while True:
            message = await link.outgoing.get()
            await link.socket.send_bytes(link.seal.close(codec.encode(message)))

    # ----------------------------------------------------------------------- operators

    async def _open_session(self, request: web.Request) -> web.Response:
        body = await request.read()
        operator_nonce, nonce = body[:64], new_nonce()
        session = secrets.token_hex(8)
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        parts = (nonce, operator_nonce, session.encode())
        self._sessions[session] = _Session(key=derive(self._token, "operator", *parts))
        opened = handshake.SessionOpened(
            session=session, nonce=nonce, proof=derive(self._token, "operator-server", *parts)
        )
        return web.Response(body=codec.encode(opened))

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.read()
        session = self._authenticate(request, body)
        if session is None:
            text = '{"error": "the token does not fit this job, or the session is unknown"}'
            return web.Response(status=401, text=text, content_type="application/json")
        path = request.match_info["path"]
        query = {name: str(value) for name, value in request.query.items()}
        status, answer = await self._handlers.answer(request.method, path, query, body)
        counter = session.counter.to_bytes(8, "big")
        signature = proof(session.key, b"answer", counter, answer)
        headers = {handshake.PROOF_HEADER: signature.hex()}
        return web.Response(
            status=status, body=answer, headers=headers, content_type="application/json"
        )

    def _authenticate(self, request: web.Request, body: bytes) -> _Session | None:
        fields = request.headers.get(handshake.SESSION_HEADER, "").split()
        session = self._sessions.get(fields[0]) if len(fields) == 3 else None
        if session is None or not fields[1].isdigit() or int(fields[1]) <= session.counter:
            return None
        counter = int(fields[1])
        target = f"{request.method} {request.path_qs}".encode()
        expected = proof(session.key, target, counter.to_bytes(8, "big"), body).hex()
        if not is_equal(expected.encode(), fields[2].encode()):
            return None
        session.counter = counter
        return session


def owner_of(port: int) -> str:
    """`` (pid 12, python train.py)`` of whoever listens on `port`; empty if it can't be seen."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        is_it = connection.laddr and connection.laddr.port == port
        if is_it and connection.status == psutil.CONN_LISTEN and connection.pid:
            try:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
            except psutil.Error:
                command = "?"
            return f" (in use by pid {connection.pid}: {command})"
    return ""
