"""Worlds that no seed draws: every machine dies at once, control messages are overtaken."""

from __future__ import annotations

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
    "seeds", [range(78, 90), pytest.param(range(200), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_every_machine_dies_at_once(seeds: range) -> None:
    outcomes = [run_seed(seed, scenario=all_gone(seed)) for seed in seeds]
    assert not [str(outcome) for outcome in outcomes if outcome.violations]
    # The others had no checkpoint yet, or were stopped by what their seed has drawn beside this.
    completed = sum(outcome.code == exits.COMPLETED for outcome in outcomes)
    assert completed > len(outcomes) // 2


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(110), marks=pytest.mark.long)], ids=["few", "many"]
)
@pytest.mark.timeout(600)
def test_a_third_of_all_control_messages_is_overtaken(seeds: range) -> None:
    outcomes = [
        run_seed(seed, scenario=replace(draw_scenario(seed), overtaken=0.3)) for seed in seeds
    ]
    assert not [str(outcome) for outcome in outcomes if outcome.violations]
