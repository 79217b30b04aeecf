"""Worlds that no seed draws: every machine dies at once, control messages are overtaken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from trainmover.protocol import exits
from trainmover.simulation.runner import run_seed
from trainmover.simulation.scenario import Fault, Scenario, draw_scenario


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
