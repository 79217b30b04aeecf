"""The registry of drill points and what the controller really announces."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage

from trainmover.protocol import messages as m
from trainmover.protocol import phases


def announced(kind: str) -> list[str]:
    """Names in the order of their first announcement in a story of that kind."""
    stage = Stage().form()
    stage.gate()
    stage.phases.clear()
    if kind == "planned":
        stage.operator(m.SwitchoverRequest(request="q", machines=("m1",)))
    else:
        stage.kill_machine("m1")
    stage.gate()
    stage.wait(1)
    return list(dict.fromkeys(stage.phases))


@pytest.mark.parametrize("kind", ["planned", "unplanned"])
def test_the_controller_announces_exactly_its_phases(kind: str) -> None:
    registered = {
        phase.name
        for phase in phases.PHASES
        if kind in phase.kinds and "controller" in phase.passed_by
    }
    assert set(announced(kind)) == registered


def test_names_are_unique_and_can_be_looked_up() -> None:
    names = [phase.name for phase in phases.PHASES]
    assert len(set(names)) == len(names)
    assert phases.phase_named("flag_set").kinds == ("planned",)
    with pytest.raises(KeyError):
        phases.phase_named("unheard_of")
