"""Global random generators are captured and put back exactly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from trainmover.errors import StateMismatch
from trainmover.state.rng import (
    capture_host_rng,
    capture_rng,
    differing_generators,
    preserved_rng,
    restore_rng,
    rng_digest,
)


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        np.random.rand(3).tolist(),
        torch.randn(3).tolist(),
        torch.randint(9, (3,)).tolist(),
    ]


@pytest.mark.parametrize("odd", [False, True])
def test_restored_generators_draw_the_same(odd: bool) -> None:
    if odd:  # Python and NumPy keep every second normal number back
        random.gauss(0, 1)
        np.random.randn()
    state = capture_rng()
    digest = rng_digest()
    first = draws()
    assert rng_digest() != digest
    restore_rng(state)
    assert capture_rng() == state
    assert rng_digest() == digest
    assert draws() == first


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "python"),
        (np.random.rand, "numpy"),
        (lambda: torch.rand(1), "torch"),
    ],
)
def test_the_generator_that_moved_is_named(draw: Any, name: str) -> None:
    before = capture_rng()
    draw()
    assert differing_generators(before, capture_rng()) == (name,)
    assert differing_generators(before, before) == ()


def test_a_normal_number_kept_back_counts_as_state() -> None:
    np.random.seed(3)
    np.random.randn()
    before = capture_rng()
    np.random.randn()
    assert differing_generators(before, capture_rng()) == ("numpy",)


def test_preserved() -> None:
    before = capture_rng()
    with pytest.raises(KeyError), preserved_rng():
        draws()
        raise KeyError
    assert capture_rng() == before


def test_host_capture_can_be_restored() -> None:
    state = capture_host_rng()
    first = draws()
    restore_rng(state)
    assert draws() == first


def test_another_numpy_bit_generator() -> None:
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        state = capture_rng()
        first = np.random.rand(3).tolist()
        restore_rng(state)
        assert np.random.rand(3).tolist() == first
    finally:
        np.random.set_bit_generator(original)


def test_rubbish_is_refused() -> None:
    with pytest.raises(StateMismatch, match="random state"):
        restore_rng(b"rubbish")
