"""Stories of the start: who gets which rank, and what makes a start fail."""

from __future__ import annotations

from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m


def test_first_machines_in_order_play_the_ranks_and_the_last_is_a_standby() -> None:
    stage = Stage().form()
    assert stage.phase == "Training"
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m1", "m2", "m3"]
    view = controller.status(stage.state, stage.now)
    assert view.word == "running" and view.generation == 1
    assert [(s.machine, s.is_ready) for s in view.standbys] == [("m4", True)]
    kinds = [type(record).__name__ for record in stage.records]
    assert kinds == [
        "TermTaken",
        "JobOpened",
        "MachinesChosen",
        "PlanRecorded",
        "CommitRecorded",
        "IdentitiesKnown",
    ]


def test_order_of_arrival_does_not_matter() -> None:
    stage = Stage()
    for name in ("m4", "m2", "m3", "m1", "m0"):
        stage.hello(name)
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m1", "m2", "m3"]


def test_another_machine_founds_when_a_named_one_does_not_come() -> None:
    stage = Stage()
    for name in ("m0", "m1", "m3", "m4"):
        stage.hello(name)
    assert stage.phase == "Forming"
    stage.wait(6)
    assert stage.phase == "Training"
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m1", "m3", "m4"]


def test_several_workers_per_machine_keep_their_local_rank() -> None:
    stage = Stage(machines=2, standby=1, workers_per_machine=2).form()
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m0", "m1", "m1"]
    assert [w.local_rank for w in stage.actors.values() if w.rank == 3] == [1]


def test_start_fails_at_its_deadline_and_says_what_is_missing() -> None:
    stage = Stage()
    stage.hello("m0")
    stage.wait(301)
    assert stage.ended is not None and stage.ended.code == exits.START_FAILED
    assert "1 of 4 machines" in stage.ended.reason


def test_incompatible_active_machine_stops_the_job_and_is_named() -> None:
    stage = Stage(standby=0)
    stage.facts["m2"] = m.Facts(must_equal=(("torch", "2.12"),))
    for name in stage.names:
        stage.hello(name)
    assert stage.ended is not None and stage.ended.code == exits.INCOMPATIBLE
    assert "m2 differs from m0: torch: expected 2.13, has 2.12" in stage.ended.reason


def test_incompatible_standby_is_refused_by_name() -> None:
    stage = Stage()
    stage.facts["m4"] = m.Facts(must_equal=(("torch", "2.12"),))
    stage.form()
    assert stage.phase == "Training"
    refusals = [b for n, b in stage.sent if isinstance(b, m.Refused)]
    assert refusals and "torch: expected 2.13, has 2.12" in refusals[0].reason
    assert controller.status(stage.state, stage.now).word == "degraded"


def test_worker_that_ends_before_training_is_started_again_then_the_start_fails() -> None:
    stage = Stage(standby=0)
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    for name in stage.names:
        stage.hello(name)
    for _ in range(3):
        assert stage.ended is None
        first = next(a for a in stage.actors.values() if a.machine == "m0")
        stage.exit(first.incarnation)
    assert stage.ended is not None and stage.ended.code == exits.START_FAILED


def test_loss_while_plan_one_is_open_forms_again_under_a_new_number() -> None:
    stage = Stage(standby=0)
    silent = ["m1."]
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued) and name[:3] in silent
    for name in stage.names:
        stage.hello(name)
    assert stage.phase == "Switching"
    silent.clear()
    stage.exit(next(a.incarnation for a in stage.actors.values() if a.machine == "m1"))
    assert stage.phase == "Training" and stage.state.generation == 2
    assert [r.number for r in stage.recorded(journal.AbortRecorded)] == [1]


def test_script_failure_at_the_start_names_the_first_rank_and_spares_the_standby() -> None:
    stage = Stage().form()
    for rank in (2, 0):
        failed = m.ScriptFailed(
            incarnation=stage.name(rank),
            rank=rank,
            step=0,
            text=f"Traceback of {rank}",
            error="ValueError: x",
            was_running_out=False,
            is_machine_caused=False,
        )
        stage.worker(stage.name(rank), failed)
    for rank in range(4):
        stage.exit(stage.name(rank))
    assert stage.phase == "Training"
    stage.wait(1)
    assert stage.ended is not None and stage.ended.code == exits.SCRIPT_FAILED
    assert "Traceback of 2" in stage.ended.reason
    assert stage.recorded(journal.IncidentOpened) == []


def test_a_founder_that_leaves_before_the_start_is_replaced() -> None:
    stage = Stage()
    stage.silenced = lambda name, body: isinstance(body, m.LaunchWorkers)
    for name in stage.names:
        stage.hello(name)
    stage.agent("m1", m.AgentLeaving(machine="m1", reason="SIGTERM"))
    stage.silenced = lambda name, body: False
    stage.wait(7)
    assert stage.phase == "Training"
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m2", "m3", "m4"]
