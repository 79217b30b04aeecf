"""Seeded worlds: clean with all rules on, the same twice, and able to fail with a rule off."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.simulation.regressions import MUTANTS, REGRESSIONS, SEEDS_TO_TRY, aimed

from trainmover.simulation import numbers
from trainmover.simulation.runner import Outcome, run, run_seed, trace
from trainmover.simulation.scenario import Fault, draw_scenario

SEEDS = 40
"""Of `make check`; `make sim` and CI run a thousand."""

DIGESTS = """
from trainmover.simulation.runner import run_seed
for seed in range(4):
    print(run_seed(seed).digest)
"""


@pytest.mark.timeout(600)
def test_seeds_are_clean() -> None:
    summary = run(SEEDS)
    assert summary.is_clean, "\n".join(summary.lines())
    assert summary.seeds == SEEDS
    assert summary.by_code["completed"] > SEEDS // 2


def test_a_seed_is_the_same_world_every_time() -> None:
    first = [run_seed(seed) for seed in range(3)]
    assert [run_seed(seed) for seed in range(3)] == first
    assert len({outcome.digest for outcome in first}) == 3


@pytest.mark.timeout(600)
def test_hash_seeds_change_nothing() -> None:
    root = Path(__file__).parents[2]
    digests = []
    for hash_seed in ("1", "4711"):
        environment = dict(os.environ, PYTHONHASHSEED=hash_seed, PYTHONPATH=str(root / "src"))
        command = [sys.executable, "-c", DIGESTS]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=500
        )
        digests.append(done.stdout.split())
    assert digests[0] == digests[1]
    assert len(digests[0]) == 4


@pytest.mark.parametrize(("seed", "why"), REGRESSIONS)
def test_what_was_found_once_stays_fixed(seed: int, why: str) -> None:
    outcome = run_seed(seed)
    assert not outcome.violations, f"{why}: {outcome.violations[0]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rule", "faults", "machines", "steps"), MUTANTS)
def test_without_a_rule_the_checker_finds_a_violation(
    rule: str, faults: tuple[Fault, ...], machines: int, steps: int
) -> None:
    for seed in range(SEEDS_TO_TRY):
        scenario = aimed(seed, *faults, machines=machines, steps=steps)
        mutant = replace(scenario, without=(rule,))
        if run_seed(seed, scenario=mutant).violations:
            assert not run_seed(seed, scenario=scenario).violations
            return
    raise AssertionError(f"{SEEDS_TO_TRY} seeds without the rule {rule} found nothing")


def test_a_failure_is_told_with_the_line_that_repeats_it() -> None:
    summary = run(1, 7, without=("wait_for_commit",))
    assert not summary.is_clean
    assert "trainmover simulate --seeds 1 --first 7" in str(summary)


def test_a_trace_ends_with_the_outcome_and_changes_nothing() -> None:
    lines = trace(3)
    assert "seed=3" in lines[0]
    assert str(run_seed(3)) == lines[-1]


def test_progress_is_told_per_seed() -> None:
    seen: list[Outcome] = []
    run(2, 5, on_outcome=seen.append)
    assert [outcome.seed for outcome in seen] == [5, 6]


def test_scenarios_differ_and_reach_every_kind_of_fault() -> None:
    kinds = {fault.kind for seed in range(200) for fault in draw_scenario(seed).faults}
    assert {"kill_worker", "silence_machine", "switch_two", "crash_at_append"} <= kinds
    assert draw_scenario(1) == draw_scenario(1)


def test_numbers_show_a_skipped_result_and_a_mixed_state() -> None:
    state = numbers.first(0)
    gradients = (3, 4)
    applied = numbers.apply(state, 0, gradients, is_skipped=False, changes_in_tail=False)
    skipped = numbers.apply(state, 0, gradients, is_skipped=True, changes_in_tail=False)
    other = numbers.apply(state, 0, (4, 3), is_skipped=False, changes_in_tail=False)
    assert len({applied.digest(), skipped.digest(), other.digest(), state.digest()}) == 4
