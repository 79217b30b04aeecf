"""How much slower a job's steps are while a standby rehearses: seen from heartbeats."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import messages as m


class Slow(Stage):
    """A stage whose standbys rehearse until they are told to be ready."""

    def _introduce(self, machine: str) -> None:
        for actor in [each for each in self.actors.values() if each.machine == machine]:
            self.worker(actor.incarnation, actor.up())

    def _to_worker(self, actor, body) -> None:  # type: ignore[no-untyped-def]
        if not isinstance(body, m.BecomeStandby):
            super()._to_worker(actor, body)

    def train(self, seconds: int, gates: int) -> None:
        """`gates` in each second."""
        for _ in range(seconds):
            self.gate(gates)
            self.wait(1.0, step_s=1.0)

    def finish_rehearsal(self) -> None:
        """The standby is ready."""
        (standby,) = [actor for actor in self.actors.values() if actor.rank < 0]
        self.worker(standby.incarnation, standby.ready(0))


def test_steps_beside_a_rehearsal_are_set_against_those_without() -> None:
    stage = Slow()
    stage.form()
    stage.train(6, gates=4)
    stage.finish_rehearsal()
    assert controller.status(stage.state, stage.now).standbys[0].slowdown == 0.0
    stage.train(8, gates=5)
    (view,) = controller.status(stage.state, stage.now).standbys
    assert view.slowdown == pytest.approx(1.25)
    stage.kill_machine("m1")
    stage.wait(2)
    stage.gate(2)
    stage.wait(4)
    (report,) = stage.state.closed
    slowdowns = [role.slowdown for role in report.roles]
    assert slowdowns == [0.0, pytest.approx(1.25), 0.0, 0.0]


def test_an_incident_says_who_was_waited_for() -> None:
    """No standby is ready: the joiner is the critical path, its process and its `main` apart."""
    stage = Slow()
    stage.form()
    stage.train(2, gates=4)
    stage.kill_machine("m1")
    stage.wait(3, step_s=1.0)
    stage.finish_rehearsal()
    stage.gate(2)
    stage.wait(4)
    (report,) = stage.state.closed
    waited = {phase.name: phase.waited_for for phase in report.phases if phase.waited_for}
    joiner = report.roles[1].incarnation
    assert waited["joiner_ready"].startswith(f"{joiner} (process 0.00 s, main built and rehearsed ")
    assert waited["prepared"] in {role.incarnation for role in report.roles}
    assert waited["reported"]
