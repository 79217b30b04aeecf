"""A waiting thread does the channels' reading, and gives it back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.waiting import eventually
from trainmover.communicator.engine import Engine


class _Wire:
    """A watched socket that notes who read what."""

    def __init__(self, engine: Engine, then: Callable[[bytes], None]) -> None:
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.readers: list[int] = []
        self.has_grad: list[bool] = []
        self._then = then
        engine.watch(self.here.fileno(), self._readable, can_be_led=True)

    def _readable(self) -> None:
        try:
            received = self.here.recv(64)
        except BlockingIOError:
            return
        self.readers.append(threading.get_ident())
        self.has_grad.append(torch.is_grad_enabled())
        self._then(received)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    made.start()
    yield made
    made.stop(5.0)


def _waiting(engine: Engine, future: Any, enter: Callable[[], Any]) -> threading.Thread:
    def wait() -> None:
        with enter():
            engine.wait(future)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def _leads(engine: Engine, thread: threading.Thread) -> None:
    eventually(lambda: engine._leader_id == thread.ident, "a leader")


def test_who_waits_reads_and_the_io_thread_reads_again_afterwards(engine: Engine) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    late = threading.Event()

    def take(received: bytes) -> None:
        if received == b"result":
            future.set_result(None)
            engine.completed()
        if received == b"later":
            late.set()

    wire = _Wire(engine, take)
    thread = _waiting(engine, future, torch.enable_grad)
    _leads(engine, thread)
    wire.there.send(b"result")
    thread.join(10.0)
    assert not thread.is_alive()
    wire.there.send(b"later")
    assert late.wait(10.0)
    assert wire.readers == [thread.ident, engine._thread_id]
    assert wire.has_grad == [False, False]
    engine.submit(lambda: engine.unwatch(wire.here.fileno()))


def test_a_result_from_another_thread_ends_the_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmover.communicator.engine._LONGEST_POLL_S", 600.0)
    future: torch.futures.Future[Any] = torch.futures.Future()
    thread = _waiting(engine, future, torch.no_grad)
    _leads(engine, thread)

    def complete() -> None:
        future.set_result(None)
        engine.completed()

    engine.submit(complete)
    thread.join(30.0)  # less than one poll: it was woken
    assert not thread.is_alive()


def test_timers_and_submitted_calls_go_on_while_somebody_leads(engine: Engine) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    thread = _waiting(engine, future, torch.no_grad)
    _leads(engine, thread)
    seen: list[str] = []
    engine.submit(lambda: seen.append("submitted"))
    engine.call_later(0.01, lambda: seen.append("timer"))
    eventually(lambda: sorted(seen) == ["submitted", "timer"], "both calls")
    future.set_result(None)
    engine.completed()
    thread.join(10.0)
    assert not thread.is_alive()


def test_one_leads_and_others_wait(engine: Engine) -> None:
    first: torch.futures.Future[Any] = torch.futures.Future()
    second: torch.futures.Future[Any] = torch.futures.Future()

    def take(received: bytes) -> None:
        (first if received == b"1" else second).set_result(None)
        engine.completed()

    wire = _Wire(engine, take)
    leader = _waiting(engine, first, torch.no_grad)
    _leads(engine, leader)
    other = _waiting(engine, second, torch.no_grad)
    wire.there.send(b"2")
    other.join(10.0)
    assert not other.is_alive()
    wire.there.send(b"1")
    leader.join(10.0)
    assert not leader.is_alive()
    assert set(wire.readers) == {leader.ident}
    engine.submit(lambda: engine.unwatch(wire.here.fileno()))


def test_arithmetic_stays_out_of_the_callers_inference_mode(engine: Engine) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    wire = _Wire(engine, lambda _: future.set_result(None))
    thread = _waiting(engine, future, torch.inference_mode)
    wire.there.send(b"result")
    thread.join(10.0)
    assert not thread.is_alive()
    assert wire.readers == [engine._thread_id]
    engine.submit(lambda: engine.unwatch(wire.here.fileno()))
