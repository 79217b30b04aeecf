"""Every named scenario, with real processes: the numbers are the undisturbed run's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import tiny

from trainmover.drills.runner import run_drill
from trainmover.drills.scenario import SCENARIOS, Scenario

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


COVERED_ELSEWHERE = frozenset(
    {
        "kill_one_worker",
        "kill_one_machine",
        "drain_one_machine",
        "back_to_back",
        "return_as_standby",
        "kill_agent",  # tests/process/snapshots: a lost agent costs no snapshot
        "reset_connection",  # tests/process/steps: at every collective
        "stop_worker",  # tests/process/hangs
    }
)
"""What these do, `tests/process` and the other scenarios do in every run."""


def _marked(scenario: Scenario) -> object:
    marks = [pytest.mark.long] if scenario.name in COVERED_ELSEWHERE else []
    return pytest.param(scenario, id=scenario.name, marks=marks)


@pytest.mark.parametrize("scenario", [*map(_marked, SCENARIOS)])
def test_the_numbers_are_those_of_the_undisturbed_run(scenario: Scenario, tmp_path: Path) -> None:
    seed = tiny.seed()
    print(f"{tiny.SEED_VARIABLE}={seed}")
    found = run_drill(scenario, tiny.drill_job(), seed, tmp_path)
    assert found.is_passed, found.sentence()
