"""Worlds whose steps have a collective behind the gate: struck there, all ranks repeat the step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainmover.simulation import tails
from trainmover.simulation.runner import run_seed
from trainmover.simulation.scenario import Fault, Scenario, draw_scenario

SEEDS = range(700, 730)


def struck(seed: int, **changes: object) -> Scenario:
    """The scenario of a seed, with two more deaths behind gates."""
    drawn = draw_scenario(seed)
    duration_s = drawn.steps * (drawn.step_s + 0.04)
    deaths = [Fault(duration_s * at, False, "kill_worker", 0.0, "tail") for at in (0.3, 0.7)]
    faults = sorted((*drawn.faults, *deaths), key=lambda fault: fault.at_s)
    known = {
        "has_tail_collective": True,
        "channel_delay_s": 0.05,
        "faults": tuple(faults),
    }
    return replace(drawn, **{**known, **changes})  # type: ignore[arg-type]


def test_every_number_is_that_of_the_undisturbed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_back = []
    real = tails.go_back

    def noted(process: object, plan: object) -> None:
        kept = process.kept  # type: ignore[attr-defined]
        real(process, plan)  # type: ignore[arg-type]
        if kept is not None and process.kept is None:  # type: ignore[attr-defined]
            gone_back.append(process)

    monkeypatch.setattr(tails, "go_back", noted)
    for seed in SEEDS:
        outcome = run_seed(seed, scenario=struck(seed))
        assert not outcome.violations, str(outcome)
    assert gone_back  # some had their tail behind them when another's was cut short


def test_a_rank_that_saves_for_long_is_waited_for() -> None:
    for seed in SEEDS[:8]:
        outcome = run_seed(seed, scenario=struck(seed, slow_tail_s=12.0))
        assert not outcome.violations, str(outcome)
