"""A generator's memory tells of every change; what can't be vouched for is read out each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainmover.state.generator_memory import Remembered, numpy_memory, python_memory
from trainmover.state.rng import capture_rng, preserved_rng

PYTHON: dict[str, Callable[[random.Random], object]] = {
    "uniform": lambda one: one.random(),
    "integer": lambda one: one.randrange(3),
    "normal": lambda one: one.gauss(0, 1),
    "bytes": lambda one: one.getrandbits(1),
    "seeded": lambda one: one.seed(7),
    "put back": lambda one: one.setstate(random.Random(8).getstate()),
}
NUMPY: dict[str, Callable[[Any], object]] = {
    "uniform": lambda one: one.random_sample(),
    "integer": lambda one: one.randint(3),
    "normal": lambda one: one.standard_normal(),
    "shuffled": lambda one: one.permutation(5),
    "seeded": lambda one: one.seed(7),
    "put back": lambda one: one.set_state(np.random.RandomState(8).get_state()),
}


@pytest.mark.parametrize("what", PYTHON)
def test_every_draw_from_python_shows(what: str) -> None:
    one = random.Random(5)
    memory = python_memory(one)
    assert memory is not None, "this interpreter is not vouched for: the gate is slower here"
    for _ in range(700):  # through one making of new words
        before = memory()
        assert memory() == before
        PYTHON[what](one)
        is_changed = what not in ("seeded", "put back")
        assert (memory() != before) or not is_changed


@pytest.mark.parametrize("what", NUMPY)
def test_every_draw_from_numpy_shows(what: str) -> None:
    one = np.random.RandomState(5)
    memory = numpy_memory(one)
    assert memory is not None, "this NumPy is not vouched for: the gate is slower here"
    for _ in range(700):
        before = memory()
        assert memory() == before
        NUMPY[what](one)
        is_changed = what not in ("seeded", "put back")
        assert (memory() != before) or not is_changed


def test_what_is_remembered_is_what_is_read() -> None:
    """The half of a pair of normal numbers that is kept back changes neither words nor position."""
    one = np.random.RandomState(5)
    read = Remembered(lambda: repr(one.get_state(legacy=False)).encode(), numpy_memory(one))
    for _ in range(20):
        one.standard_normal()
        assert read() == repr(one.get_state(legacy=False)).encode()
        assert read() == repr(one.get_state(legacy=False)).encode()
    kept = one.get_state()
    one.standard_normal()
    read()
    one.set_state(kept)
    assert read() == repr(one.get_state(legacy=False)).encode()


def test_others_are_read_out_each_time() -> None:
    class Own(random.Random):
        pass

    assert python_memory(Own(1)) is None
    assert python_memory(None) is None
    assert numpy_memory(np.random.default_rng(1)) is None
    assert numpy_memory(np.random.RandomState(np.random.PCG64(1))) is None


def test_another_generator_in_its_place_is_noticed() -> None:
    before = np.random.get_bit_generator()
    with preserved_rng():
        first = capture_rng()
        np.random.set_bit_generator(np.random.MT19937(11))
        try:
            second = capture_rng()
            np.random.rand()
            third = capture_rng()
        finally:
            np.random.set_bit_generator(before)
        assert len({first, second, third}) == 3
        assert capture_rng() == first
