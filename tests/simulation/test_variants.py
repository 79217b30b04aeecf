"""Worlds that no seed draws: every machine dies at once, control messages are overtaken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from trainmover.controller import disks
from trainmover.controller.state import State
from trainmover.protocol import exits
from trainmover.protocol.journal import AbortRecorded, PlanRecorded
from trainmover.simulation import earlier
from trainmover.simulation.runner import judge, run_seed, run_world
from trainmover.simulation.scenario import (
    Fault,
    Scenario,
    draw_scenario,
    with_lost_sources,
    with_own_disks,
)
from trainmover.simulation.world import World


def all_gone(seed: int) -> Scenario:
    """A job with a durable checkpoint that loses all machines; they come back with nothing."""
    drawn = draw_scenario(seed)
    every, steps = drawn.snapshot_every or 2, max(drawn.steps, 16)
    at_s = steps * (drawn.step_s + 0.04) * 0.6
    return replace(
        drawn,
        steps=steps,
        snapshot_every=every,
        checkpoint_every=every,
        revive_s=drawn.revive_s or 2.0,
        script_fails_at=-1,
        faults=(*drawn.faults, Fault(at_s, False, "kill_all_machines", 0.0, "")),
    )


@pytest.mark.parametrize(
    "seeds",
    # 264: the word of a commit was lost with the machines; the checkpoint has to be found.
    [(264, *range(80, 90)), pytest.param(range(280), marks=pytest.mark.long)],
    ids=["few", "many"],
)
@pytest.mark.timeout(600)
def test_every_machine_dies_at_once(seeds: Sequence[int]) -> None:
    outcomes = [run_seed(seed, scenario=all_gone(seed)) for seed in seeds]
    assert not [str(outcome) for outcome in outcomes if outcome.violations]
    # The others had no checkpoint yet, or were stopped by what their seed has drawn beside this.
    completed = sum(outcome.code == exits.COMPLETED for outcome in outcomes)
    assert completed > len(outcomes) // 2


def power_cut(seed: int) -> Scenario:
    """A job whose storage takes hardly anything; all memory goes at once, disks come back."""
    drawn = all_gone(seed)
    cut = [
        replace(fault, kind="reboot_all_machines") if fault.kind == "kill_all_machines" else fault
        for fault in drawn.faults
    ]
    return replace(drawn, faults=tuple(cut), has_disks=True, storage_fails=0.4, is_sharded=True)


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(200), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_a_power_cut_leaves_the_disks(seeds: range) -> None:
    outcomes = [run_seed(seed, scenario=power_cut(seed)) for seed in seeds]
    assert not [str(outcome) for outcome in outcomes if outcome.violations]
    # Disks fail as often as the storage does: in many worlds nothing was whole anywhere.
    assert any(outcome.code == exits.COMPLETED for outcome in outcomes)


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(110), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_a_third_of_all_control_messages_is_overtaken(seeds: range) -> None:
    outcomes = [
        run_seed(seed, scenario=replace(draw_scenario(seed), overtaken=0.3)) for seed in seeds
    ]
    assert not [str(outcome) for outcome in outcomes if outcome.violations]


FEW_DISKS = (2, 6, 15, 25, 34, 39, 40, 97)
"""Among them: an older checkpoint is all that is left, and a machine is back without its disk."""


@pytest.mark.parametrize(
    "seeds", [FEW_DISKS, pytest.param(range(300), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_machines_that_share_nothing_restore_from_all_their_disks(seeds: Sequence[int]) -> None:
    restored = []
    for seed in seeds:
        world = World(with_own_disks(draw_scenario(seed)))
        run_world(world)
        outcome = judge(world)
        assert not outcome.violations, str(outcome)
        made = [each.plan for each in world.commander.journal if isinstance(each, PlanRecorded)]
        restored += [plan.restore for plan in made if plan.restore and plan.kind == "unplanned"]
    assert any(earlier.is_ours(name) for name in restored), "from the run before, in the middle"
    assert any(not earlier.is_ours(name) for name in restored), "from its own checkpoints"


def test_counting_on_disks_that_are_gone_or_another_s_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(seed: int) -> tuple[str, ...]:
        return run_seed(seed, scenario=with_own_disks(draw_scenario(seed))).violations

    gone = disks.gone

    def trusting(state: State, *parts: Any) -> tuple[str, ...]:
        return gone(replace(state, kept=replace(state.kept, disk_checks={})), *parts)

    monkeypatch.setattr(disks, "gone", trusting)
    assert found(2), "a machine has come back without what was on its disk"
    monkeypatch.setattr(disks, "gone", lambda *_: ())
    assert found(15)


FEW_FETCHES = (70, 71, *range(6))


@pytest.mark.parametrize(
    "seeds", [FEW_FETCHES, pytest.param(range(300), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_plans_are_renewed_while_joiners_fetch(seeds: Sequence[int]) -> None:
    fetched_again = 0
    for seed in seeds:
        world = World(with_lost_sources(draw_scenario(seed)))
        run_world(world)
        outcome = judge(world)
        assert not outcome.violations, str(outcome)
        fetched_again += sum(isinstance(each, AbortRecorded) for each in world.commander.journal)
    assert fetched_again


def test_a_fetch_that_does_not_end_with_its_plan_is_found() -> None:
    """The main thread takes no other plan before it is done: the plan in force has to wait."""
    for seed in FEW_FETCHES[:2]:
        scenario = with_lost_sources(draw_scenario(seed))
        assert not run_seed(seed, scenario=scenario).violations
        found = run_seed(seed, scenario=replace(scenario, fetches_end=False)).violations
        assert found and found[0].startswith("I12"), found
