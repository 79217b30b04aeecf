"""Seeded worlds: clean with all rules on, the same twice, and able to fail with a rule off."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.regressions import MUTANTS, REGRESSIONS, SEEDS_TO_TRY, aimed

from trainmover.protocol import exits
from trainmover.protocol.journal import PlanRecorded
from trainmover.protocol.messages import Version
from trainmover.simulation import loading, numbers
from trainmover.simulation.memory import Copy, Memory
from trainmover.simulation.runner import Outcome, judge, run, run_seed, run_world, trace
from trainmover.simulation.scenario import Fault, Scenario, draw_scenario
from trainmover.simulation.world import World

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
    outcome = run_seed(seed, scenario=draw_scenario(seed))
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


def kept(seed: int, *faults: Fault, machines: int = 3) -> Scenario:
    """A job without replicas whose agents keep a snapshot of every other step."""
    scenario = aimed(seed, *faults, machines=machines, steps=24)
    return replace(scenario, is_sharded=True, snapshot_every=2, step_s=0.3)


LATE = Fault(4.0, False, "kill_worker", 0.0, "")
MACHINE = Fault(4.0, False, "kill_machine", 0.0, "")
AGENT = Fault(3.5, False, "kill_agent", 0.0, "")


def rollbacks(world: World) -> int:
    plans = [r.plan for r in world.commander.journal if isinstance(r, PlanRecorded)]
    return sum(plan.is_rollback for plan in plans)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("faults", [(LATE,), (MACHINE,), (LATE, MACHINE), (AGENT, LATE)])
def test_unreplicated_state_survives_as_many_losses_as_there_are_copies(
    faults: tuple[Fault, ...],
) -> None:
    found = 0
    for seed in range(6):
        world = World(kept(seed, *faults))
        run_world(world)
        outcome = judge(world)
        assert not outcome.violations and outcome.code == exits.COMPLETED, outcome
        found += rollbacks(world)
    assert found, "no seed lost a rank: victims were standbys"


@pytest.mark.timeout(300)
def test_a_plane_that_hands_out_another_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, arrive = Memory.read, loading._arrive

    def older(self: Memory, rank: int, version: Version) -> Copy | None:
        known = [each for _, each in self.own if each < version]
        return honest(self, rank, max(known, default=version))

    def dishonest(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "read", older)
            arrive(*arguments)

    monkeypatch.setattr(loading, "_arrive", dishonest)
    monkeypatch.setattr(Memory, "drop", lambda self, keep: None)
    late = replace(LATE, at_s=7.0)
    found = [run_seed(seed, scenario=kept(seed, late)).violations for seed in range(6)]
    assert any(violations and violations[0].startswith("I9") for violations in found), found


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
