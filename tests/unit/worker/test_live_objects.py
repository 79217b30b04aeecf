"""Live objects are found by type, and nobody who builds a tuple meanwhile is disturbed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from trainmover.worker.live_objects import live_objects, with_subclasses


class Own(nn.Linear):
    """A subclass of a subclass."""


@pytest.fixture
def eager_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_objects_of_a_type_and_of_those_derived_from_it() -> None:
    models = [nn.Linear(1, 1), Own(1, 1)]
    optimizer = torch.optim.SGD(models[0].parameters(), 0.1)
    found = live_objects([nn.Linear])
    assert all(any(item is model for item in found) for model in models)
    assert all(isinstance(item, nn.Linear) for item in found)
    assert any(item is optimizer for item in live_objects([Own, torch.optim.Optimizer]))
    assert {nn.Linear, Own} <= with_subclasses([nn.Module])


def test_a_dead_proxy_is_not_woken_and_the_collector_stays_as_it_was() -> None:
    model = Own(1, 1)
    proxy = weakref.proxy(model)
    del model
    assert live_objects([Own]) == []
    assert any(item is proxy for item in live_objects([weakref.CallableProxyType]))
    for is_on in (False, True):
        (gc.enable if is_on else gc.disable)()
        live_objects([Own])
        assert gc.isenabled() is is_on


def test_audit_hooks_are_not_called_for_each_object() -> None:
    heard: list[str] = []
    is_on = True

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if is_on:
            heard.append(event)

    sys.addaudithook(hear)  # there is no way to take it out again
    live_objects([Own])
    is_on = False
    assert len(heard) < 100, heard[:5]


def test_nothing_else_is_kept() -> None:
    other = ([1], [2])
    before = sys.getrefcount(other)
    gc.disable()
    live_objects([Own])
    after = sys.getrefcount(other)
    gc.enable()
    assert after == before


def test_threads_that_build_tuples_meanwhile_are_not_disturbed(eager_switches: None) -> None:
    failed: list[BaseException] = []
    built = [0, 0]
    is_over = threading.Event()

    def build(index: int) -> None:
        while not is_over.is_set():
            try:
                assert tuple(each * each for each in range(50))[-1] == 49 * 49
            except BaseException as error:
                failed.append(error)
            built[index] += 1

    threads = [threading.Thread(target=build, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            live_objects([nn.Module])
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60.0)
    assert failed == []
    assert min(built) > 0
