"""Stories of the end: finish, stop at a boundary, stop now."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage

from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m


def test_finish_completes_and_everybody_goes_standbys_too() -> None:
    stage = Stage().form()
    stage.gate(3)
    stage.finish()
    assert stage.ended is not None and stage.ended.code == exits.COMPLETED
    assert stage.linked == set() and stage.actors == {}
    kinds = [type(record).__name__ for record in stage.records[-2:]]
    assert kinds == ["CompleteRecorded", "StoppedRecorded"]


def test_workers_that_linger_behind_the_loop_are_waited_for_and_bounded() -> None:
    stage = Stage().form()
    stage.silenced = lambda name, body: isinstance(body, m.Complete) and name.startswith("m0.")
    stage.finish()
    assert stage.phase == "Completing"
    stage.wait(30)
    assert stage.ended is None
    stage.wait(31)
    assert stage.ended is not None and stage.ended.code == exits.COMPLETED


def test_a_loss_behind_the_finish_gate_does_not_undo_the_end() -> None:
    stage = Stage().form()
    passed = m.FinishPassed(incarnation=stage.name(0), generation=1, step=3)
    stage.worker(stage.name(0), passed)
    assert stage.phase == "Finishing"
    stage.exit(stage.name(0))
    assert stage.ended is not None and stage.ended.code == exits.COMPLETED
    assert stage.recorded(journal.IncidentOpened) == []


def test_finish_aborts_an_open_switchover() -> None:
    stage = Stage().form()
    stage.silenced = lambda name, body: isinstance(body, m.Prepare)
    stage.operator(m.SwitchoverRequest(request="q", machines=("m1",)))
    stage.silenced = lambda name, body: False
    stage.finish()
    assert stage.ended is not None and stage.ended.code == exits.COMPLETED
    assert "finished" in stage.replies[-1].text


def test_stop_at_the_boundary() -> None:
    stage = Stage().form()
    stage.operator(m.StopRequest(request="q", mode="boundary"))
    asked = [b for _, b in stage.sent if isinstance(b, m.ToWorker)]
    assert sum(isinstance(b.body, m.StopAtBoundary) for b in asked) == 4
    stage.finish(is_stopped=True)
    assert stage.ended is not None and stage.ended.code == exits.STOPPED_BY_OPERATOR


def test_stop_request_survives_an_incident_and_a_restart_of_the_controller() -> None:
    stage = Stage().form()
    stage.operator(m.StopRequest(request="q", mode="boundary"))
    stage.exit(stage.name(1))
    stage.crash()
    stage.sent.clear()
    stage.wait(2)
    asked = [b.incarnation for _, b in stage.sent if isinstance(b, m.ToWorker)]
    assert stage.name(1) in asked and stage.state.is_stop_wanted


@pytest.mark.parametrize("is_formed", [True, False])
def test_stop_now(is_formed: bool) -> None:
    stage = Stage()
    if is_formed:
        stage.form()
    else:
        stage.hello("m0")
    stage.operator(m.StopRequest(request="q", mode="now"))
    assert stage.ended is not None and stage.ended.code == exits.STOPPED_BY_OPERATOR


def test_an_agent_that_does_not_hear_the_stop_is_not_waited_for_for_ever() -> None:
    stage = Stage().form()
    stage.dead.add("m3")
    stage.operator(m.StopRequest(request="q", mode="now"))
    assert stage.ended is None and stage.phase == "Ending"
    stage.wait(9)
    assert stage.ended is not None


def test_an_exception_behind_the_loop_is_the_jobs_result() -> None:
    stage = Stage().form()
    stage.silenced = lambda name, body: isinstance(body, m.Complete) and name.startswith("m0.")
    stage.finish()
    failed = m.ScriptFailed(
        incarnation=stage.name(0),
        rank=0,
        step=3,
        text="Traceback",
        error="OSError: no space",
        was_running_out=False,
        is_machine_caused=False,
    )
    stage.worker(stage.name(0), failed)
    stage.exit(stage.name(0), signal=None)
    stage.wait(1)
    assert stage.ended is not None and stage.ended.code == exits.SCRIPT_FAILED


def test_a_rank_that_is_stuck_in_the_finish_gate_is_freed_by_completion() -> None:
    stage = Stage().form()
    passed = m.FinishPassed(incarnation=stage.name(0), generation=1, step=3)
    stage.worker(stage.name(0), passed)
    actor = stage.actors[stage.name(2)]
    stage.worker(actor.incarnation, actor.broken())
    assert stage.ended is not None and stage.ended.code == exits.COMPLETED
