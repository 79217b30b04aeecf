"""Wrong values are named; the priority comes back."""

from __future__ import annotations

import os

import pytest

from trainmover.errors import ConfigError
from trainmover.rehearsal.config import RehearsalConfig
from trainmover.rehearsal.priority import Priority


@pytest.mark.parametrize(
    ("field", "value"),
    [("answers", "guessed"), ("writes", "maybe"), ("recording_limit_mb", -1), ("nice", 20)],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"rehearsal.{field}"):
        RehearsalConfig(**{field: value})  # type: ignore[arg-type]


def test_priority_is_lowered_and_comes_back() -> None:
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    priority = Priority(7)
    priority.lower()
    during = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))
    assert (during != before) == bool(priority.means)
    assert priority.means in {"", "batch policy"} or during[0] == before[0] + 7
    priority.restore()
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)) == before
    assert priority.means == ""


def test_no_step_back_is_a_choice() -> None:
    priority = Priority(0)
    priority.lower()
    assert priority.means == ""
