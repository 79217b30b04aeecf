"""Identical means identical: each way in which two runs can differ is found and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainmover.drills.compare import compare, has_fallen
from trainmover.drills.request import JobResult

LOSSES = {step: {"loss": (1.0 / (step + 1)).hex()} for step in range(20)}


def result(**fields: Any) -> JobResult:
    """A completed run with `LOSSES`."""
    start = JobResult(
        code=0,
        output="",
        losses=LOSSES,
        repeated=(),
        final={"digests": ["0a"]},
        incidents=(),
        outcome=None,
        seconds=1.0,
    )
    return replace(start, **fields)


def test_equal_runs_are_identical() -> None:
    found = compare(result(), result())
    assert found.is_identical
    assert "20 losses of 20 steps" in found.sentence()


def test_one_bit_of_one_loss_is_found() -> None:
    near = {**LOSSES, 7: {"loss": (0.125 + 2**-55).hex()}}
    found = compare(result(losses=near), result())
    assert not found.is_identical
    assert "of step 7" in found.sentence()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"losses": {s: v for s, v in LOSSES.items() if s != 3}}, "steps missing: 3"),
        ({"losses": {**LOSSES, 20: {"loss": "0x1p-1"}}}, "steps too many: 20"),
        ({"repeated": (5,)}, "recorded twice: 5"),
        ({"final": {"digests": ["0b"]}}, "final parameters or optimizer state differ"),
        ({"final": None}, "no digest"),
        ({"losses": {**LOSSES, 4: {}}}, "1 of 20 values differ"),
    ],
)
def test_what_differs_is_named(fields: dict[str, Any], words: str) -> None:
    found = compare(result(**fields), result())
    assert not found.is_identical
    assert words in found.sentence()


def test_two_empty_runs_are_not_identical() -> None:
    empty = result(losses={})
    assert not compare(empty, empty).is_identical
    assert "no step" in compare(empty, empty).sentence()


def test_a_flat_loss_has_not_fallen() -> None:
    assert has_fallen(LOSSES)
    assert not has_fallen({step: {"loss": (1.0).hex()} for step in range(40)})
    assert not has_fallen({})
