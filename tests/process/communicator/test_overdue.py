"""A peer that does not come is asked, then named or excused; nothing waits for ever."""

from __future__ import annotations

from . import overdue_cases as cases
from .fleet import run_ranks


def test_overdue_peer_is_reported() -> None:
    assert run_ranks(2, cases.overdue) == [True, True]


def test_a_hang_is_reported_of_the_rank_that_has_not_come() -> None:
    assert run_ranks(4, cases.culprit, collective_timeout_s=cases.LIMIT_S) == [True] * 4


def test_whoever_saves_between_steps_may_keep_others_waiting() -> None:
    limits = {"collective_timeout_s": cases.LIMIT_S, "outside_step_limit_s": 60.0}
    results = run_ranks(3, cases.excused, **limits)
    assert results == [True] * 3


def test_a_stopped_peer_is_given_up() -> None:
    assert run_ranks(2, cases.stopped, collective_timeout_s=cases.LIMIT_S) == [True, True]


def test_a_gate_nobody_else_enters_is_reported() -> None:
    assert run_ranks(2, cases.silent_gate, collective_timeout_s=1.5) == [True, True]
