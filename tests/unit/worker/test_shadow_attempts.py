"""A joiner makes as many attempts of each part as the members have made (decision 0003)."""

from __future__ import annotations

import pytest

from trainmover.worker.shadow import ShadowAttempts

LIMIT = 6


def made(exact: int, version: int, parts: int) -> tuple[int, ...]:
    """How often each part of a step is run by a standby that is told this."""
    shadow = ShadowAttempts(exact, version, LIMIT)
    counts = [0] * max(1, parts)
    while shadow.is_due(is_settled=False):
        shadow.begin()
        if not parts:
            counts[0] += 1
        for part in range(parts):
            counts[part] += shadow.times_of_part(is_first=part == 0)
    assert exact < 0 or shadow.made == exact
    return tuple(counts)


@pytest.mark.parametrize("exact", [0, 1, 2, 5])
def test_a_step_without_parts_is_one_attempt(exact: int) -> None:
    assert made(exact, exact, 0) == (exact,)


@pytest.mark.parametrize(
    ("exact", "version", "counts"),
    [
        (0, 0, (0, 0)),  # nobody has begun
        (1, 0, (1, 0)),  # struck in the first part of the first step
        (2, 0, (2, 0)),  # and once more
        (1, 1, (1, 0)),  # in front of the second part
        (2, 1, (1, 1)),
        (3, 1, (1, 2)),
        (3, 2, (2, 1)),  # in the first part of the second step
        (4, 3, (2, 2)),
        (7, 6, (4, 3)),  # above the limit of a step without parts
    ],
)
def test_two_parts(exact: int, version: int, counts: tuple[int, int]) -> None:
    assert made(exact, version, 2) == counts


def test_until_the_sequence_has_settled() -> None:
    assert made(-1, 0, 0) == (LIMIT,)
    assert made(-1, 0, 3) == (LIMIT,) * 3
    shadow = ShadowAttempts(-1, 0, LIMIT)
    shadow.begin()
    assert not shadow.is_due(is_settled=True)
