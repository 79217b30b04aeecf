"""Fetches that another thread calls off: connecting, reading, and never begun."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from trainmover.edges.errand import Errand
from trainmover.errors import ConnectTimeout, TransportError

LIMIT_S = 60.0
"""Far beyond what a test may take: whatever ends earlier was ended."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as found:
        yield found


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()
    return host, port


def _filled(listener: socket.socket) -> list[socket.socket]:
    """Nobody accepts: from here on the kernel answers no attempt to connect."""
    waiting = []
    while True:
        stream = socket.socket()
        stream.settimeout(0.5)
        waiting.append(stream)
        try:
            stream.connect(_address(listener))
        except TimeoutError:
            return waiting


def _outcome_of(errand: Errand, address: tuple[str, int], has_begun: threading.Event) -> str:
    has_begun.set()
    try:
        with errand.connect(*address) as stream:
            return repr(stream.recv(1))
    except TransportError as error:
        return str(error)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_answered", [False, True], ids=["connecting", "reading"])
def test_the_end_reaches_a_thread_that_waits(listener: socket.socket, is_answered: bool) -> None:
    waiting = [] if is_answered else _filled(listener)
    errand = Errand("state for plan 2", LIMIT_S)
    has_begun = threading.Event()
    found: list[str] = []
    reader = threading.Thread(
        target=lambda: found.append(_outcome_of(errand, _address(listener), has_begun))
    )
    reader.start()
    assert has_begun.wait(20)
    accepted = [listener.accept()[0]] if is_answered else []
    errand.end()
    reader.join(20)
    assert not reader.is_alive()
    for stream in waiting + accepted:
        stream.close()
    # Between the peer's `accept` and the registration here, it is the errand that says no.
    assert found[0] in ("b''", "state for plan 2 was called off"), found
    assert is_answered or found[0] != "b''"


def test_nothing_is_begun_for_an_errand_that_is_over(listener: socket.socket) -> None:
    errand = Errand("state for plan 2", LIMIT_S)
    errand.end()
    with pytest.raises(TransportError, match="state for plan 2 was called off"):
        errand.connect(*_address(listener))
    with pytest.raises(TransportError, match="called off"):
        errand.check()


def test_a_wanted_stream_works_and_keeps_its_limit(listener: socket.socket) -> None:
    errand = Errand("state", LIMIT_S)
    with errand.connect(*_address(listener)) as stream, listener.accept()[0] as other:
        assert stream.gettimeout() == LIMIT_S
        other.sendall(b"x")
        assert stream.recv(1) == b"x"


def test_who_does_not_listen_refuses_and_who_is_silent_is_named(listener: socket.socket) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            Errand("state", LIMIT_S).connect(*nobody.getsockname())
    waiting = _filled(listener)
    with pytest.raises(ConnectTimeout, match=r"nobody answered at .* within 0\.3 s"):
        Errand("state", 0.3).connect(*_address(listener))
    for stream in waiting:
        stream.close()
