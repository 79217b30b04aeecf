"""Agent's end of the link: connects, proves the token, reconnects with growing pauses.

Decides when to try again, nothing else. What is sent while the link is down is dropped on purpose:
the agent's decider says hello again after each reconnection and everything else is asked for again
(all messages are idempotent).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import aiohttp

from trainmover.edges.seal import Seal, derive, is_equal, new_nonce
from trainmover.errors import AuthenticationFailed, ProtocolError, RemoteProtocolError
from trainmover.protocol import codec, handshake
from trainmover.protocol.messages import FromAgentMessage, ToAgentMessage

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
HANDSHAKE_LIMIT_S = 10.0
PING_S = 5.0
MAX_QUEUED = 10_000

FATAL_CLOSES = {
    handshake.CLOSE_BAD_TOKEN: "the controller does not accept this agent's token",
    handshake.CLOSE_BAD_VERSION: "the controller speaks another version of the link",
    handshake.CLOSE_SUPERSEDED: "another agent has registered under the same machine name",
}


@dataclass(frozen=True, kw_only=True)
class AgentLinkHandlers:
    """Whom to tell; called on the event loop, must not block."""

    on_up: Callable[[], None]
    on_down: Callable[[str], None]
    on_message: Callable[[ToAgentMessage], None]


class AgentLink:
    """The one connection of an agent to its controller."""

    def __init__(
        self,
        find_address: Callable[[], str],
        machine: str,
        token: str,
        handlers: AgentLinkHandlers,
    ) -> None:
        """`find_address` is asked before each try: a restarted controller may have moved."""
        self._find_address = find_address
        self._address = ""
        self._machine = machine
        self._token = token
        self._handlers = handlers
        self._outgoing: asyncio.Queue[FromAgentMessage] = asyncio.Queue(MAX_QUEUED)
        self._is_up = False

    @property
    def is_up(self) -> bool:
        """Whether messages go out at present."""
        return self._is_up

    def send(self, message: FromAgentMessage) -> None:
        """Send, if the link is up; else drop."""
        if not self._is_up:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            log.warning("the controller does not read: dropped %s", type(message).__name__)

    async def drain(self, limit_s: float) -> None:
        """Wait until everything queued is written, at most `limit_s`."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while self._is_up and not self._outgoing.empty():
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)

    async def run(self) -> None:
        """Keep the link up until cancelled. Raises AuthenticationFailed when it can never work."""
        pause_s = FIRST_PAUSE_S
        async with aiohttp.ClientSession() as session:
            while True:
                reason = "closed"
                try:
                    reason = await self._connect_once(session)
                    pause_s = FIRST_PAUSE_S
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    reason = f"{type(error).__name__}: {error}"
                except ProtocolError as error:
                    reason = str(error)
                if self._is_up:
                    self._is_up = False
                    self._handlers.on_down(reason)
                log.info("link to %s: %s; next try in %.2f s", self._address, reason, pause_s)
                await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _connect_once(self, session: aiohttp.ClientSession) -> str:
        self._address = self._find_address()
        # A host that is gone or stopped answers nothing, and another controller may listen
        # elsewhere already: the whole way to the link is bounded, from the first packet on.
        limit = asyncio.timeout(HANDSHAKE_LIMIT_S)
        async with limit, contextlib.AsyncExitStack() as stack:
            socket = await stack.enter_async_context(self._open(session))
            seal = await self._shake_hands(socket)
            opened = stack.pop_all()
        async with opened:
            while not self._outgoing.empty():
                self._outgoing.get_nowait()
            self._is_up = True
            self._handlers.on_up()
            writer = asyncio.create_task(self._write(socket, seal), name="link-writer")
            try:
                return await self._read(socket, seal)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _open(
        self, session: aiohttp.ClientSession
    ) -> AbstractAsyncContextManager[aiohttp.ClientWebSocketResponse]:
        return session.ws_connect(
            f"http://{self._address}{handshake.AGENT_PATH}",
            max_msg_size=codec.MAX_MESSAGE_BYTES,
            heartbeat=PING_S,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
        )

    async def _shake_hands(self, socket: aiohttp.ClientWebSocketResponse) -> Seal:
        challenge = handshake.decode_as(
            handshake.Challenge, await self._receive(socket), "the controller"
        )
        if challenge.version != handshake.LINK_VERSION:
            raise AuthenticationFailed(
                f"the controller at {self._address} speaks link version {challenge.version}, "
                f"this agent {handshake.LINK_VERSION}: install the same trainmover on both"
            )
        nonce = new_nonce()
        parts = (challenge.nonce, nonce, self._machine.encode())
        answer = handshake.ChallengeAnswer(
            machine=self._machine, nonce=nonce, proof=derive(self._token, "agent", *parts)
        )
        await socket.send_bytes(codec.encode(answer))
        accepted = handshake.decode_as(
            handshake.ChallengeAccepted, await self._receive(socket), "the controller"
        )
        if not is_equal(accepted.proof, derive(self._token, "controller", *parts)):
            text = f"whoever listens on {self._address} does not know this job's token"
            raise AuthenticationFailed(text)
        key = derive(self._token, "link", *parts)
        return Seal(key, sends_as="agent", receives_from="controller")

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> bytes:
        message = await socket.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            return bytes(message.data)
        self._check_close(socket.close_code)
        raise RemoteProtocolError(f"the link was closed (code {socket.close_code})")

    def _check_close(self, code: int | None) -> None:
        if code in FATAL_CLOSES:
            raise AuthenticationFailed(
                f"{FATAL_CLOSES[code]} (machine '{self._machine}', controller {self._address})"
            )

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, seal: Seal) -> str:
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return f"a frame of type {message.type.name}"
            self._handlers.on_message(codec.decode_to_agent(seal.open(message.data)))
        self._check_close(socket.close_code)
        return f"closed by the controller (code {socket.close_code})"

    async def _write(self, socket: aiohttp.ClientWebSocketResponse, seal: Seal) -> None:
        while True:
            message = await self._outgoing.get()
            await socket.send_bytes(seal.close(codec.encode(message)))
