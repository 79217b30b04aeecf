"""Whether a Python or NumPy generator has changed since it was last read out, by its memory.

Reading such a generator out costs 20 to 80 microseconds, because 624 words become as many Python
objects; a step does it twice, and most steps draw from neither. The bytes of the generator's own C
structures say the same in one: if none of them has changed, the state has not.

Decides nothing about what the state is: it only vouches for bytes that `rng.py` has read out the
official way, and only where a test on generators of its own has shown that on this interpreter and
this NumPy every kind of change shows in these bytes. Elsewhere it vouches for nothing.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable
from typing import Any, Final

_COUNT_BYTES: Final = ctypes.sizeof(ctypes.c_ssize_t)
"""The reference count in front of every object: it changes for reasons of its own."""

Memory = Callable[[], object]
"""Gives a comparable value that is equal only while the generator has not changed."""


class Remembered:
    """Bytes of one generator, read out anew only when it has changed."""

    def __init__(self, read: Callable[[], bytes], memory: Memory | None) -> None:
        self._read = read
        self._memory = memory
        self._seen: object = None
        self._data = b""

    def __call__(self) -> bytes:
        """What `read` gives now."""
        if self._memory is None:
            return self._read()
        seen = self._memory()  # before reading: a draw in between shows at the next look
        if seen != self._seen:
            self._data, self._seen = self._read(), seen
        return self._data


def python_memory(generator: Any) -> Memory | None:
    """Memory of one of Python's generators; None where it can't be vouched for."""
    if type(generator) is not random.Random or not _is_python_inline():
        return None
    return _python_memory(generator)


def numpy_memory(generator: Any) -> Memory | None:
    """Memory of a `numpy.random.RandomState`; None where it can't be vouched for."""
    import numpy as np

    if type(generator) is not np.random.RandomState or not _is_numpy_inline():
        return None
    return _numpy_memory(generator)


def _body(thing: object) -> Callable[[], bytes]:
    size = type(thing).__basicsize__ - _COUNT_BYTES
    return functools.partial(ctypes.string_at, id(thing) + _COUNT_BYTES, size)


def _python_memory(generator: random.Random) -> Memory:
    body = _body(generator)
    # The second of a pair of normal numbers: an attribute of Python's, not one of C's.
    return lambda: (body(), getattr(generator, "gauss_next"))  # noqa: B009


def _numpy_memory(generator: Any) -> Memory | None:
    body = _body(generator)
    kind = generator._bit_generator
    if type(kind).__name__ != "MT19937":
        return None
    # The words and the position, as in the header file that NumPy installs.
    words = functools.partial(ctypes.string_at, kind.ctypes.state_address, 4 * 625)
    # Where another one is put in its place, nothing equals anything any more.
    return lambda: (words(), body()) if generator._bit_generator is kind else object()


@functools.cache
def _is_python_inline() -> bool:
    """Words, position and the second normal number of a pair: each must show."""
    if sys.implementation.name != "cpython":
        return False
    one = random.Random(1)
    memory = _python_memory(one)
    draws: tuple[Callable[[], object], ...] = (
        one.random,  # makes new words
        one.random,  # moves the position only
        lambda: one.gauss(0.0, 1.0),
        lambda: one.gauss(0.0, 1.0),  # takes the second one of the pair only
        lambda: one.seed(2),
        lambda: one.setstate(random.Random(3).getstate()),
    )
    return _do_all_show(memory, draws)


@functools.cache
def _is_numpy_inline() -> bool:
    import numpy as np

    if sys.implementation.name != "cpython":
        return False
    one: Any = np.random.RandomState(1)
    memory = _numpy_memory(one)
    if memory is None:
        return False
    draws: tuple[Callable[[], object], ...] = (
        one.random_sample,
        one.random_sample,
        one.standard_normal,
        one.standard_normal,
        lambda: one.seed(2),
        lambda: one.set_state(np.random.RandomState(3).get_state()),
    )
    return _do_all_show(memory, draws)


def _do_all_show(memory: Memory, draws: tuple[Callable[[], object], ...]) -> bool:
    seen = [memory()]
    if memory() != seen[0]:
        return False
    for draw in draws:
        draw()
        seen.append(memory())
    return len(set(seen)) == len(seen)
