"""The link between agent and controller on loopback: who may speak, what happens to the rest."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from trainmover.edges.agent_link import AgentLink, AgentLinkHandlers
from trainmover.edges.controller_server import ControllerServer, ServerHandlers
from trainmover.edges.operator_client import OperatorClient
from trainmover.edges.seal import new_token
from trainmover.errors import AuthenticationFailed, ConfigError, TransportError
from trainmover.protocol import handshake
from trainmover.protocol.messages import FromAgentMessage, Heartbeat, Refused, ToAgentMessage

LIMIT_S = 20.0
TOKEN = new_token()


@dataclass
class Desk:
    """A controller's server and what it has heard."""

    server: ControllerServer = field(init=False)
    heard: list[tuple[str, FromAgentMessage]] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


async def answer(method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, bytes]:
    return 200, b'{"path": "%s", "size": %d}' % (path.encode(), len(body))


@asynccontextmanager
async def desk(port: int = 0) -> AsyncIterator[Desk]:
    table = Desk()
    table.server = ControllerServer(
        TOKEN,
        ServerHandlers(
            on_linked=lambda name: table.links.append(f"+{name}"),
            on_unlinked=lambda name: table.links.append(f"-{name}"),
            on_message=lambda name, message: table.heard.append((name, message)),
            answer=answer,
        ),
    )
    await table.server.start("127.0.0.1", port)
    try:
        yield table
    finally:
        await table.server.close()


@dataclass
class Caller:
    """An agent's link and what it has heard."""

    link: AgentLink
    task: asyncio.Task[None]
    heard: list[ToAgentMessage]


@asynccontextmanager
async def caller(address: str, token: str = TOKEN, machine: str = "m0") -> AsyncIterator[Caller]:
    heard: list[ToAgentMessage] = []
    handlers = AgentLinkHandlers(
        on_up=lambda: None, on_down=lambda _: None, on_message=heard.append
    )
    link = AgentLink(lambda: address, machine, token, handlers)
    task = asyncio.create_task(link.run())
    try:
        yield Caller(link=link, task=task, heard=heard)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(claim: object) -> None:
    assert callable(claim)
    async with asyncio.timeout(LIMIT_S):
        while not claim():
            await asyncio.sleep(0.005)


def beat() -> Heartbeat:
    return Heartbeat(machine="m0", incarnation="a")


def test_messages_pass_both_ways() -> None:
    async def play() -> None:
        async with desk() as table, caller(table.address) as agent:
            await until(lambda: agent.link.is_up)
            agent.link.send(beat())
            await until(lambda: table.heard)
            assert table.heard == [("m0", beat())]
            refused = Refused(term=1, reason="x" * 100_000, code=2)
            assert table.server.send("m0", refused)
            await until(lambda: agent.heard)
            assert agent.heard == [refused]
            assert not table.server.send("m1", refused)

    asyncio.run(play())


def test_a_wrong_token_is_one_clear_error() -> None:
    async def play() -> None:
        async with desk() as table, caller(table.address, new_token()) as agent:
            await until(agent.task.done)
            with pytest.raises(AuthenticationFailed, match="does not accept this agent's token"):
                agent.task.result()
            assert table.links == []

    asyncio.run(play())


def test_a_controller_without_the_token_is_not_believed() -> None:
    async def play() -> None:
        async def pretend(request: aiohttp.web.Request) -> aiohttp.web.WebSocketResponse:
            response = aiohttp.web.WebSocketResponse()
            await response.prepare(request)
            from trainmover.protocol import codec

            challenge = handshake.Challenge(version=handshake.LINK_VERSION, nonce=b"n" * 16)
            await response.send_bytes(codec.encode(challenge))
            await response.receive()
            accepted = handshake.ChallengeAccepted(proof=b"p" * 32)
            await response.send_bytes(codec.encode(accepted))
            await response.receive()
            return response

        application = aiohttp.web.Application()
        application.router.add_get(handshake.AGENT_PATH, pretend)
        runner = aiohttp.web.AppRunner(application)
        await runner.setup()
        await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with caller(f"127.0.0.1:{port}") as agent:
            await until(agent.task.done)
            with pytest.raises(AuthenticationFailed, match="does not know this job's token"):
                agent.task.result()
        await runner.cleanup()

    asyncio.run(play())


def test_the_link_comes_back_after_the_controller_does() -> None:
    async def play() -> None:
        async with desk() as first:
            address, port = first.address, first.server.port
            async with caller(address) as agent:
                await until(lambda: agent.link.is_up)
                await first.server.close()
                await until(lambda: not agent.link.is_up)
                async with desk(port) as second:
                    await until(lambda: agent.link.is_up)
                    agent.link.send(beat())
                    await until(lambda: second.heard)

    asyncio.run(play())


def test_the_same_machine_twice_ends_the_first_with_a_reason() -> None:
    async def play() -> None:
        async with desk() as table, caller(table.address) as first:
            await until(lambda: first.link.is_up)
            async with caller(table.address) as second:
                await until(lambda: second.link.is_up)
                await until(first.task.done)
                with pytest.raises(AuthenticationFailed, match="same machine name"):
                    first.task.result()
                second.link.send(beat())
                await until(lambda: table.heard)

    asyncio.run(play())


def test_garbage_on_the_port_disturbs_nobody() -> None:
    async def play() -> None:
        async with desk() as table, caller(table.address) as agent:
            await until(lambda: agent.link.is_up)
            _, writer = await asyncio.open_connection("127.0.0.1", table.server.port)
            writer.write(b"\x00\xff" * 5000)
            await writer.drain()
            writer.close()
            async with aiohttp.ClientSession() as session:
                url = f"http://{table.address}{handshake.AGENT_PATH}"
                async with session.ws_connect(url) as stranger:
                    await stranger.receive()
                    await stranger.send_bytes(b"not a message")
                    answer = await stranger.receive()
                    assert answer.type is aiohttp.WSMsgType.CLOSE
            agent.link.send(beat())
            await until(lambda: table.heard)

    asyncio.run(play())


def test_operators_prove_the_token_and_replays_are_refused() -> None:
    async def play() -> None:
        async with desk() as table:
            port = table.server.port
            client = OperatorClient("127.0.0.1", port, TOKEN)
            found = await asyncio.to_thread(client.get, "status", after=3)
            assert found == {"path": "status", "size": 0}
            assert (await asyncio.to_thread(client.get, "again"))["path"] == "again"
            stranger = OperatorClient("127.0.0.1", port, new_token())
            with pytest.raises(AuthenticationFailed, match="wrong token"):
                await asyncio.to_thread(stranger.get, "status")
            client._counter -= 1  # as whoever recorded the last request would
            target = f"{handshake.OPERATOR_PATH}/again"
            status, _ = await asyncio.to_thread(client._send, "GET", target, b"")
            assert status == 401
            client.close()
            stranger.close()

    asyncio.run(play())


def test_a_controller_that_is_not_there_is_named() -> None:
    with socket.socket() as nobody:  # keeps the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(TransportError, match=f"127.0.0.1:{port} does not answer"):
            OperatorClient("127.0.0.1", port, TOKEN).get("status")


def test_a_port_in_use_is_named() -> None:
    async def play() -> None:
        async with desk() as table:
            with pytest.raises(ConfigError, match=f"port {table.server.port}"):
                async with desk(table.server.port):
                    pass

    asyncio.run(play())


def test_a_controller_that_never_answers_does_not_keep_an_agent_from_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host has been stopped, or cut off, and another controller has taken over elsewhere."""
    monkeypatch.setattr("trainmover.edges.agent_link.HANDSHAKE_LIMIT_S", 0.5)

    async def play() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel alone says yes
            addresses = [f"127.0.0.1:{silent.getsockname()[1]}"]
            async with desk() as table:
                addresses.append(table.address)
                handlers = AgentLinkHandlers(
                    on_up=lambda: None, on_down=lambda _: None, on_message=lambda _: None
                )
                find = lambda: addresses.pop(0) if len(addresses) > 1 else addresses[0]  # noqa: E731
                link = AgentLink(find, "m0", TOKEN, handlers)
                task = asyncio.create_task(link.run())
                await until(lambda: link.is_up)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(play())


def test_a_stopped_agent_does_not_keep_the_controller_from_its_end() -> None:
    """It reads no more, and more is on its way to it than any buffer holds."""

    async def play() -> None:
        handlers = AgentLinkHandlers(
            on_up=lambda: None, on_down=lambda _: None, on_message=lambda _: None
        )
        async with desk() as table, aiohttp.ClientSession() as session:
            link = AgentLink(lambda: table.address, "m0", TOKEN, handlers)
            stopped = await session.ws_connect(f"http://{table.address}{handshake.AGENT_PATH}")
            await link._shake_hands(stopped)
            await until(lambda: table.server.machines)
            for _ in range(40):
                assert table.server.send("m0", Refused(term=1, reason="x" * 1_000_000, code=2))
            async with asyncio.timeout(LIMIT_S):
                await table.server.close()
            assert not stopped.closed, "it has not even heard of it"

    asyncio.run(play())
