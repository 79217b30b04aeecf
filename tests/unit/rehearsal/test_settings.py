"""Wrong values are named; the priority comes back."""

from __future__ import annotations

import os

import pytest

from trainmover.errors import ConfigError
from trainmover.rehearsal.config import RehearsalConfig
from trainmover.rehearsal.priority import Priority


@pytest.mark.parametrize(
    ("field", "value"),
    [("answers", "guessed"), ("writes", "maybe"), ("recording_limit_mb", -1)],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"rehearsal.{field}"):
        RehearsalConfig(**{field: value})  # type: ignore[arg-type]


def test_priority_is_lowered_and_comes_back() -> None:
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    priority = Priority()
    priority.lower()
    during = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    assert (during != before) == bool(priority.means)
    priority.restore()
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before
    assert priority.means == ""
