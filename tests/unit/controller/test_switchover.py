"""Stories of planned switchovers: the course, refusals, and what a fault inside does."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m


def ask(stage: Stage, *machines: str, to: tuple[str, ...] = ()) -> m.OperatorReply:
    return stage.operator(m.SwitchoverRequest(request="q", machines=machines, to=to))


def test_one_machine_moves_and_comes_back_as_the_standby() -> None:
    stage = Stage().form()
    leaver = stage.name(1)
    ask(stage, "m1")
    assert [reply.is_final for reply in stage.replies] == [False, True]
    assert stage.replies[-1].is_accepted and "rank 1 on m4" in stage.replies[-1].text
    assert stage.state.generation == 2 and stage.machine(1) == "m4"
    assert leaver in stage.actors, "kept until the first gate of the new generation"
    stage.gate()
    assert leaver not in stage.actors
    view = controller.status(stage.state, stage.now)
    assert [(s.machine, s.is_ready) for s in view.standbys] == [("m1", True)]
    (report,) = stage.state.closed
    assert report.kind == "planned" and report.steps_repeated == 0
    names = [phase.name for phase in report.phases]
    assert names[:4] == ["joiner_chosen", "prepared_phase_one", "flag_raised", "boundary"]
    assert report.roles[1].before == leaver and report.roles[1].source == "leaver"
    kinds = [type(r).__name__ for r in stage.records[6:]]
    assert kinds == ["PlanRecorded", "TargetFixed", "CommitRecorded", "IncidentClosed"]


def test_two_machines_move_at_once() -> None:
    stage = Stage(standby=2).form()
    ask(stage, "m0", "m2")
    stage.gate()
    assert [stage.machine(rank) for rank in range(4)] == ["m4", "m1", "m5", "m3"]
    assert stage.state.generation == 2


def test_a_named_standby_is_used() -> None:
    stage = Stage(standby=2).form()
    ask(stage, "m0", to=("m5",))
    assert stage.machine(0) == "m5"


def test_machines_with_several_workers_move_whole() -> None:
    stage = Stage(machines=2, standby=1, workers_per_machine=2).form()
    ask(stage, "m0")
    assert [stage.machine(rank) for rank in range(4)] == ["m2", "m2", "m1", "m1"]
    assert [stage.actors[stage.name(rank)].local_rank for rank in range(4)] == [0, 1, 0, 1]


def test_switchovers_back_to_back() -> None:
    stage = Stage().form()
    for name in ("m0", "m1", "m2", "m3"):
        ask(stage, name)
        assert stage.replies[-1].is_accepted, stage.replies[-1].text
        stage.gate(2)
    assert [stage.machine(rank) for rank in range(4)] == ["m4", "m0", "m1", "m2"]


@pytest.mark.parametrize(
    ("machines", "to", "words"),
    [
        (("m9",), (), "no machine is called m9"),
        (("m4",), (), "m4 has no rank, it is a standby"),
        (("m1",), ("m1",), "can't be switched over to itself"),
        (("m1",), ("m2",), "m2 plays ranks itself"),
        (("m1",), ("m8",), "no machine is called m8"),
        (("m1", "m2"), ("m4",), "2 machines leave, 1 standbys"),
        (("m1", "m2"), (), "no standby is ready"),
        (("m1", "m1"), (), "named twice"),
        ((), (), "at least one"),
    ],
)
def test_refusals_say_why(machines: tuple[str, ...], to: tuple[str, ...], words: str) -> None:
    stage = Stage().form()
    reply = ask(stage, *machines, to=to)
    assert not reply.is_accepted and reply.is_final and words in reply.text
    assert stage.phase == "Training" and stage.state.generation == 1


def test_refused_while_another_is_open_and_while_forming() -> None:
    stage = Stage(standby=2)
    assert "still forming" in ask(stage, "m1").text
    stage.form()
    stage.silenced = lambda name, body: isinstance(body, m.Prepare)
    ask(stage, "m1")
    reply = stage.operator(m.SwitchoverRequest(request="r", machines=("m2",)))
    assert not reply.is_accepted and "open already" in reply.text


def test_a_standby_that_failed_is_named_with_its_reason() -> None:
    stage = Stage().form()
    standby = next(a for a in stage.actors.values() if a.machine == "m4")
    stage.silenced = lambda name, body: isinstance(body, m.BecomeStandby)
    stage.worker(
        standby.incarnation,
        m.StandbyFailed(incarnation=standby.incarnation, reason="train.py:3 reads a file"),
    )
    assert "train.py:3 reads a file" in ask(stage, "m1").text


# --------------------------------------------------------------------------- faults inside


def silence(stage: Stage, *kinds: type) -> None:
    stage.silenced = lambda name, body: isinstance(body, kinds)


def test_phase_one_that_is_not_ready_in_time_is_aborted_and_training_goes_on() -> None:
    stage = Stage().form()
    silence(stage, m.Prepare)
    ask(stage, "m1")
    assert stage.phase == "Preparing"
    stage.gate(3)
    stage.wait(121)
    assert stage.phase == "Training" and stage.state.generation == 1
    assert not stage.replies[-1].is_accepted and "aborted" in stage.replies[-1].text
    assert stage.recorded(journal.AbortRecorded)[0].number == 2


@pytest.mark.parametrize("silent", [m.Prepare, m.RaiseFlag, m.PlanIssued])
def test_death_of_the_joiner_aborts_and_the_leaver_goes_on(silent: type) -> None:
    stage = Stage().form()
    silence(stage, silent)
    ask(stage, "m1")
    joiner = next(a.incarnation for a in stage.actors.values() if a.machine == "m4")
    silence(stage)
    stage.exit(joiner)
    assert stage.phase == "Training" and stage.state.generation == 1
    assert stage.recorded(journal.IncidentOpened) == []
    assert stage.state.closed[-1].kind == "aborted"
    stage.gate()
    assert ask(stage, "m1").is_accepted, "the joiner's machine has a new worker"


@pytest.mark.parametrize("silent", [m.Prepare, m.RaiseFlag, m.PlanIssued])
@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_leaver_or_stayer_aborts_and_becomes_an_incident(silent: type, rank: int) -> None:
    stage = Stage().form()
    silence(stage, silent)
    ask(stage, "m1")
    assert stage.phase in {"Preparing", "Flagged", "Switching"}
    silence(stage)
    lost = stage.name(rank)
    stage.exit(lost)
    assert stage.phase == "Training" and stage.state.generation == 4 - 1
    assert [r.number for r in stage.recorded(journal.AbortRecorded)] == [2]
    assert stage.name(rank) != lost and stage.machine(rank) == f"m{rank}"
    assert not stage.replies[-1].is_accepted


def test_boundary_that_is_never_reached_aborts() -> None:
    stage = Stage().form()
    silence(stage, m.RaiseFlag)
    ask(stage, "m1")
    assert stage.phase == "Flagged"
    stage.wait(61)
    assert stage.phase == "Training" and stage.state.generation == 1


def test_late_answers_to_an_aborted_number_get_abort_again() -> None:
    stage = Stage().form()
    silence(stage, m.RaiseFlag)
    ask(stage, "m1")
    stage.wait(61)
    late = m.AtBoundary(incarnation=stage.name(0), number=2, version=m.Version(step=5, lineage=1))
    stage.sent.clear()
    stage.worker(stage.name(0), late)
    bodies = [b.body for _, b in stage.sent if isinstance(b, m.ToWorker)]
    assert [type(b) for b in bodies] == [m.Abort] and bodies[0].number == 2


def test_two_boundaries_for_one_flag_stop_the_job() -> None:
    stage = Stage().form()
    stage.actors[stage.name(3)].version = m.Version(step=9, lineage=1)
    ask(stage, "m1")
    assert stage.ended is not None and stage.ended.code == exits.PROTOCOL_FAILED


def test_unequal_digests_abort_and_name_both_ends() -> None:
    stage = Stage().form()
    joiner = next(a for a in stage.actors.values() if a.machine == "m4")
    joiner.bulk_digest = 8
    ask(stage, "m1")
    assert stage.phase == "Training" and stage.state.generation == 1
    assert joiner.incarnation in stage.replies[-1].text


# --------------------------------------------------------------------------- leaving agents


def test_an_agent_that_leaves_is_moved_and_let_go() -> None:
    stage = Stage().form()
    stage.agent("m2", m.AgentLeaving(machine="m2", reason="SIGTERM"))
    assert stage.machine(2) == "m4"
    assert "m2" in stage.linked
    stage.gate()
    assert "m2" not in stage.linked
    assert stage.phase == "Training"


def test_an_agent_that_leaves_waits_for_a_standby() -> None:
    stage = Stage(standby=0).form()
    stage.agent("m2", m.AgentLeaving(machine="m2", reason="SIGTERM"))
    assert stage.machine(2) == "m2"
    stage.hello("m9")
    assert stage.machine(2) == "m9"


def test_repeated_first_gates_of_the_base_generation_belong_to_no_open_switchover() -> None:
    stage = Stage().form()
    silence(stage, m.Prepare)
    ask(stage, "m1")
    for rank in range(4):
        name = stage.name(rank)
        stage.worker(name, m.FirstGate(incarnation=name, generation=1, step=0))
    silence(stage)
    stage.wait(2)
    assert stage.state.generation == 2
    assert stage.replies[-1].is_final and stage.replies[-1].is_accepted


def test_a_machine_that_left_is_accepted_again_when_it_comes_back() -> None:
    stage = Stage().form()
    stage.agent("m2", m.AgentLeaving(machine="m2", reason="SIGTERM"))
    stage.gate()
    assert "m2" not in stage.linked
    stage.agents["m2"] = "agent-m2-again"
    stage.hello("m2")
    view = controller.status(stage.state, stage.now)
    assert [(s.machine, s.is_ready) for s in view.standbys] == [("m2", True)]


def test_a_machine_is_given_back_where_it_shall_not_return_to_the_pool() -> None:
    names = tuple(f"m{index}" for index in range(5))
    config = controller.Config(machine_names=names, standby_machines=1, return_to_pool=False)
    stage = Stage(config=config).form()
    ask(stage, "m1")
    stage.gate()
    assert "m1" not in stage.linked and stage.phase == "Training"
