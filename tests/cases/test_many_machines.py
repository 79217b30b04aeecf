"""C100: several machines at once are one switchover, not one after the other: EXACT."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact, trace
from tests.cases.runs import ask_for_switchover, end, request, undisturbed
from tests.holding import TRACED, let_go, wait_until_held
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits
from trainmover.protocol.journal import IncidentReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

MACHINES = 6
STEPS = 60
VICTIMS = ("m0", "m2", "m4")
"""Each rank's personal state is held by the next two: none of these loses both."""
GIVES_UP_S = 3.0


def joiners(incident: IncidentReport) -> list[int]:
    """Ranks that somebody else plays since."""
    return [role.rank for role in incident.roles if role.before != role.incarnation]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Many workers on few cores: one thread each."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before


def test_three_of_six_in_one_round_and_then_there_is_no_spare(tmp_path: Path) -> None:
    """Killed at the same instant; one loss more than standbys stops the job and says so."""
    wanted = request("--stop-at", "5", "12", steps=STEPS, machines=MACHINES, standbys=3)
    impatient = (("controller.machine_wait_s", str(GIVES_UP_S)),)
    with RunningJob(replace(wanted, settings=impatient), tmp_path / "job") as job:
        job.wait_for_standby(3)
        wait_until_held(job, 5, MACHINES)
        job.kill_machine(*VICTIMS)
        let_go(job, 5)
        (incident,) = job.wait_for_incidents(1)
        wait_until_held(job, 12, MACHINES)
        job.kill_machine("m1")
        let_go(job, 12)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert incident.kind == "standby"
    assert joiners(incident) == [0, 2, 4]
    assert incident.number == incident.base_generation + 1, incident.phases
    assert result.code == exits.NO_MACHINE, result.output
    assert "no machine could take rank 1 within 3 s: there is no standby" in result.output
    assert "Traceback" not in result.output
    expected = undisturbed((), STEPS, MACHINES)
    for rank in range(MACHINES):
        ours, theirs = trace(tmp_path / "job" / "out", rank), trace(expected, rank)
        assert sorted(ours) == list(range(13))
        assert ours == {step: theirs[step] for step in ours}


def test_a_third_moves_in_one_switchover(tmp_path: Path) -> None:
    """Planned: two of six, one incident, one generation."""
    held = ("--stop-at", "8")
    wanted = request(*held, steps=STEPS, machines=MACHINES, standbys=2, settings=(TRACED,))
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(2)
        wait_until_held(job, 8, MACHINES)
        ask_for_switchover(job, "m1", "m4", ranks=MACHINES)
        let_go(job, 8)
        (incident,) = job.wait_for_incidents(1)
        result = end(job)
    assert [each.kind for each in result.incidents] == ["planned"]
    assert joiners(incident) == [1, 4]
    assert incident.number == incident.base_generation + 1
    assert incident.steps_repeated == 0
    expected = undisturbed((), STEPS, MACHINES)
    assert_exact(tmp_path / "job" / "out", expected, ranks=MACHINES, steps=STEPS)


@pytest.mark.long
def test_a_standby_that_dies_while_it_is_promoted_is_passed_over(tmp_path: Path) -> None:
    """Two die at once, one of their two successors dies with its state half received."""
    wanted = request("--stop-at", "5", steps=STEPS, machines=MACHINES, standbys=3)
    struck = replace(wanted, faults=f"kill@delta_swapped:m{MACHINES}")
    with RunningJob(struck, tmp_path / "job") as job:
        job.wait_for_standby(3)
        wait_until_held(job, 5, MACHINES)
        job.kill_machine("m1", "m4")
        let_go(job, 5)
        (incident,) = job.wait_for_incidents(1)
        assert job.struck()
        result = end(job)
    assert [each.kind for each in result.incidents] == ["standby"]
    assert joiners(incident) == [1, 4]
    machines = {incident.roles[rank].machine for rank in (1, 4)}
    assert f"m{MACHINES + 2}" in machines or f"m{MACHINES}" in machines
    expected = undisturbed((), STEPS, MACHINES)
    assert_exact(tmp_path / "job" / "out", expected, ranks=MACHINES, steps=STEPS)
