"""A process dies at every named phase of both kinds of switchover.

The whole matrix takes long: `TRAINMOVER_DEATHS=all` runs it; without, some are drawn by the seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests import tiny

from trainmover.drills.phase_deaths import Death, all_deaths, draw_deaths, scenario_of
from trainmover.drills.runner import run_drill

DRAWN = 3
DOES_ALL = os.environ.get("TRAINMOVER_DEATHS") == "all"
ALWAYS = "unplanned-digests_verified-stayer"
"""A joiner fetches from a stayer that dies: what it fetches must end with its plan."""
DUE = {ALWAYS, *(death.name for death in draw_deaths(tiny.seed(), DRAWN))}
CHOSEN = tuple(death for death in all_deaths() if DOES_ALL or death.name in DUE)


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("death", CHOSEN, ids=lambda death: death.name)
def test_a_death_at_a_phase_costs_no_number(death: Death, tmp_path: Path) -> None:
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    found = run_drill(scenario_of(death), tiny.drill_job(), tiny.seed(), tmp_path)
    assert found.is_passed, found.sentence()
