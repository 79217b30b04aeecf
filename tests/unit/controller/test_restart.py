"""Stories of a controller that dies at every named point and lives again from its journal."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m
from trainmover.units import Instant, seconds

PLANNED = (
    "joiner_chosen",
    "prepare",
    "journalled_not_sent",
    "sent_to_half",
    "flag_set",
    "all_prepared",
    "leaver_released",
)
UNPLANNED = (
    "detected",
    "all_reported",
    "joiner_chosen",
    "decided",
    "source_chosen",
    "journalled_not_sent",
    "sent_to_half",
    "all_prepared",
)


def ends(records: list[journal.AnyRecord]) -> dict[int, list[str]]:
    """How each number ended."""
    found: dict[int, list[str]] = {}
    for record in records:
        if isinstance(record, journal.CommitRecorded | journal.AbortRecorded):
            found.setdefault(record.number, []).append(type(record).__name__)
    return found


def check_numbers(stage: Stage) -> None:
    numbers = [r.plan.number for r in stage.recorded(journal.PlanRecorded)]
    assert len(set(numbers)) == len(numbers), "one number, one plan (I6)"
    assert all(len(each) == 1 for each in ends(stage.records).values()), "one end each (I5)"


def test_training_goes_on_without_and_with_the_new_controller() -> None:
    stage = Stage().form()
    stage.gate(3)
    before = [stage.name(rank) for rank in range(4)]
    stage.crash()
    stage.gate(3)
    stage.wait(20)
    assert stage.phase == "Training" and stage.state.generation == 1
    assert [stage.name(rank) for rank in range(4)] == before
    assert stage.state.incident_count == 0
    standby = next(a for a in stage.actors.values() if a.machine == "m4")
    assert stage.state.workers[standby.incarnation].readiness is not None


def test_restart_before_the_first_generation() -> None:
    stage = Stage()
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    for name in stage.names:
        stage.hello(name)
    workers = set(stage.actors)
    stage.silenced = lambda name, body: False
    stage.crash()
    stage.wait(3)
    assert stage.phase == "Training" and stage.state.generation == 1
    assert set(stage.actors) == workers, "workers are adopted, not started twice"
    check_numbers(stage)


def test_restart_while_workers_start() -> None:
    stage = Stage()
    stage.hello("m0")
    stage.crash()
    for name in stage.names:
        stage.hello(name)
    stage.wait(3)
    assert stage.phase == "Training"
    assert len(stage.actors) == 5


@pytest.mark.parametrize("point", PLANNED)
def test_planned_switchover_with_the_controller_killed_at(point: str) -> None:
    stage = Stage().form()
    stage.gate(2)
    stage.crash_at = point
    stage.operator(m.SwitchoverRequest(request="q", machines=("m1",)))
    stage.gate(1)
    stage.wait(5)
    assert stage.term == 2, "the point was reached"
    assert stage.phase == "Training"
    assert stage.state.generation in {1, 2, 3}
    check_numbers(stage)
    stage.gate(2)
    stage.operator(m.SwitchoverRequest(request="q2", machines=("m2",)))
    stage.gate(1)
    stage.wait(5)
    assert stage.machine(2) != "m2", "the next switchover works"


@pytest.mark.parametrize("point", UNPLANNED)
def test_recovery_with_the_controller_killed_at(point: str) -> None:
    stage = Stage().form()
    stage.gate(2)
    stage.crash_at = point
    stage.exit(stage.name(1))
    stage.wait(5)
    assert stage.term == 2, "the point was reached"
    assert stage.phase == "Training" and stage.state.generation >= 2
    assert stage.state.incident_count == 1
    check_numbers(stage)
    stage.gate(2)


def test_a_plan_is_sent_again_unchanged() -> None:
    stage = Stage().form()
    stage.gate(2)
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    stage.exit(stage.name(1))
    plan = stage.recorded(journal.PlanRecorded)[-1].plan
    stage.silenced = lambda name, body: False
    stage.sent.clear()
    stage.crash()
    stage.wait(3)
    again = [b.body.plan for _, b in stage.sent if isinstance(b, m.ToWorker) and _is_plan(b.body)]
    assert again and all(each == plan for each in again)
    assert stage.state.generation == plan.number


def _is_plan(body: m.ToWorkerBody) -> bool:
    return isinstance(body, m.PlanIssued)


def test_nobody_is_lost_before_the_grace_time() -> None:
    stage = Stage().form()
    stage.gate(2)
    linked = set(stage.linked)
    stage.linked.clear()
    stage.crash()
    stage.linked |= linked - {"m1"}
    for name in sorted(linked - {"m1"}):
        stage.hello(name)
    stage.wait(8)
    assert stage.state.generation == 1
    stage.wait(10)
    assert stage.state.generation == 2 and stage.machine(1) == "m4"


def test_a_replaced_worker_stays_out_after_a_restart() -> None:
    stage = Stage().form()
    stage.gate(2)
    old = stage.actors[stage.name(1)]
    stage.kill_machine("m1")
    assert stage.machine(1) == "m4"
    stage.crash()
    stage.actors[old.incarnation] = old
    stage.hello("m1")
    assert old.incarnation not in stage.actors


@pytest.mark.parametrize("is_complete", [True, False])
def test_restart_after_the_end_was_journaled(is_complete: bool) -> None:
    stage = Stage().form()
    if is_complete:
        stage.silenced = lambda name, body: isinstance(body, m.Complete)
        stage.finish()
        stage.silenced = lambda name, body: False
        wanted = exits.COMPLETED
    else:
        stage.dead.add("m3")
        stage.operator(m.StopRequest(request="q", mode="now"))
        wanted = exits.STOPPED_BY_OPERATOR
    stage.crash()
    stage.wait(10)
    assert stage.ended is not None and stage.ended.code == wanted


def test_a_controller_that_was_stopped_itself_declares_nobody_late() -> None:
    stage = Stage().form()
    stage.gate(2)
    stage.now = Instant(stage.now + seconds(60))
    stage.feed(controller.Tick())
    assert stage.state.generation == 1
    stage.wait(3)
    assert stage.state.generation == 1 and stage.state.incident_count == 0


def test_a_paused_controller_still_reads_the_reports_that_waited() -> None:
    stage = Stage().form()
    stage.gate(2)
    stage.silenced = lambda name, body: isinstance(body, m.Freeze)
    lost = stage.name(1)
    stage.exit(lost)
    stage.silenced = lambda name, body: False
    stage.now = Instant(stage.now + seconds(60))
    stage.feed(controller.Tick())
    stage.wait(2)
    assert stage.state.generation == 2
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m1", "m2", "m3"]
    assert {c.rank for c in stage.state.incident.culprits} == {1}


def test_identities_that_were_not_journaled_are_learnt_from_the_joiner() -> None:
    stage = Stage()
    stage.silenced = lambda name, body: False
    for name in stage.names:
        stage.hello(name)
    stage.gate(2)
    stage.records = [
        record for record in stage.records if not isinstance(record, journal.IdentitiesKnown)
    ]
    stage.crash()
    stage.exit(stage.name(2))
    stage.wait(3)
    assert stage.phase == "Training" and stage.state.generation == 2
