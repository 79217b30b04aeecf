"""Generations: exactly what must change changes, and nothing old is taken for new."""

from __future__ import annotations

import pytest

from . import change_cases as cases
from .fleet import run_ranks


def test_replacement_keeps_every_other_channel() -> None:
    results = run_ranks(5, cases.replacement, enders=0)
    assert results[2] is None and all(results[i] for i in (0, 1, 3, 4))


def test_planned_abort_returns_to_the_old_generation() -> None:
    assert run_ranks(2, cases.planned_abort) == [True, True]


def test_gates_and_control() -> None:
    assert run_ranks(3, cases.gates) == [True] * 3


@pytest.mark.parametrize("who_is_late", [0, 1])
def test_mismatch_names_both_calls(who_is_late: int) -> None:
    assert run_ranks(2, cases.mismatch, who_is_late) == [True, True]


def test_strangers_and_old_generations_are_refused() -> None:
    run_ranks(2, cases.fencing)


def test_death_is_seen_although_loader_children_live() -> None:
    assert run_ranks(2, cases.death_with_loader, dying=(1,))[0] is True


def test_a_peer_that_dies_in_a_broken_generation_is_named_too() -> None:
    assert run_ranks(4, cases.second_death, dying=(2, 3))[:2] == [True] * 2


def test_a_joiner_that_dies_while_it_is_prepared() -> None:
    results = run_ranks(4, cases.joiner_dies, dying=(3,))
    assert results[:3] == [True] * 3


@pytest.mark.slow
def test_the_higher_rank_knocks() -> None:
    assert run_ranks(6, cases.knock) == [True] * 6


def test_a_reset_connection_is_made_again_alone() -> None:
    assert run_ranks(3, cases.reconnect) == [True] * 3
