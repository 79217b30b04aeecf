"""The matrix of deaths covers the phases that the code names."""

from __future__ import annotations

from trainmover.drills.phase_deaths import all_deaths, draw_deaths, rule
from trainmover.edges import faults
from trainmover.protocol.phases import PHASES


def test_every_phase_has_a_victim() -> None:
    covered = {death.phase.name for death in all_deaths()}
    missing = [phase.name for phase in PHASES if phase.name not in covered]
    assert not missing, f"no process dies at {missing}: see can_pass in drills/phase_deaths.py"


def test_every_passer_of_every_phase_dies_there_itself() -> None:
    own = {(d.phase.name, d.victim) for d in all_deaths() if d.passer == d.victim}
    for phase in PHASES:
        passers = [p for p in phase.passed_by if phase.kinds != ("unplanned",) or p != "leaver"]
        for process in passers:
            assert (phase.name, process) in own


def test_every_death_can_be_injected() -> None:
    for death in all_deaths():
        (parsed,) = faults.parse(rule(death, "m4"))
        assert parsed.phase == death.phase.name
        assert parsed.action == ("kill" if death.passer == death.victim else "pause")


def test_names_are_unique_and_the_draw_repeats() -> None:
    names = [death.name for death in all_deaths()]
    assert len(set(names)) == len(names)
    assert draw_deaths(7, 5) == draw_deaths(7, 5)
    assert len(set(draw_deaths(7, 5))) == 5
