"""Stories of faults inside a recovery, of the budget of incidents, and of failing scripts."""

from __future__ import annotations

import pytest
from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m


def silence(stage: Stage, *kinds: type) -> None:
    stage.silenced = lambda name, body: isinstance(body, kinds)


def plan(stage: Stage) -> m.Plan:
    return stage.recorded(journal.PlanRecorded)[-1].plan


# --------------------------------------------------------------------------- double faults


def test_a_stayer_lost_while_reports_are_awaited_is_the_same_incident() -> None:
    stage = Stage(standby=2).form()
    stage.gate()
    silence(stage, m.Freeze)
    stage.exit(stage.name(0))
    stage.exit(stage.name(1))
    silence(stage)
    stage.wait(2)
    assert stage.phase == "Training" and stage.state.incident_count == 1
    assert {c.rank for c in stage.state.incident.culprits} == {0, 1}


def test_a_stayer_lost_while_joiners_are_awaited() -> None:
    stage = Stage().form()
    stage.gate()
    silence(stage, m.BecomeStandby)
    stage.exit(stage.name(0))
    assert stage.phase == "Gathering"
    stage.exit(stage.name(3))
    silence(stage)
    stage.wait(2)
    assert stage.phase == "Training" and stage.state.generation == 2
    assert plan(stage).joiners == (stage.name(0), stage.name(3))


@pytest.mark.parametrize("rank", [0, 2])
def test_joiner_or_stayer_lost_in_the_cut_over_aborts_and_goes_on_under_a_new_number(
    rank: int,
) -> None:
    stage = Stage().form()
    stage.gate()
    silence(stage, m.PlanIssued)
    stage.exit(stage.name(2))
    assert stage.phase == "Switching"
    lost = plan(stage).membership.members[rank].incarnation
    silence(stage)
    stage.exit(lost)
    assert stage.phase == "Training" and stage.state.generation == 3
    assert [r.number for r in stage.recorded(journal.AbortRecorded)] == [2]
    assert stage.state.incident_count == 1
    assert lost not in [stage.name(each) for each in range(4)]


def test_a_lost_edge_in_the_cut_over_is_tried_again() -> None:
    stage = Stage().form()
    stage.gate()
    silence(stage, m.PlanIssued)
    stage.exit(stage.name(2))
    joiner = plan(stage).joiners[0]
    silence(stage)
    edge = m.Edge(peer=joiner, reason="refused")
    stage.worker(stage.name(0), m.Lost(incarnation=stage.name(0), number=2, edge=edge))
    assert stage.phase == "Training" and stage.state.generation == 3
    assert stage.name(2) == joiner


def test_a_cut_over_that_hangs_is_bounded() -> None:
    stage = Stage().form()
    stage.gate()
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued) and name.startswith("m2.")
    stage.exit(stage.name(2))
    stage.wait(61 * 4, step_s=1)
    assert stage.phase == "Training" and stage.machine(2) == "m4"


def test_unequal_digest_of_a_joiner_tries_another() -> None:
    stage = Stage().form()
    stage.gate()
    bad = next(a for a in stage.actors.values() if a.machine == "m4")
    bad.bulk_digest = 8
    stage.kill_machine("m1")
    assert bad.incarnation not in stage.actors
    stage.wait(3)
    assert stage.phase == "Training" and stage.machine(1) == "m4"


def test_a_prepared_joiner_of_a_journaled_commit_is_a_stayer() -> None:
    stage = Stage().form()
    stage.gate()
    stage.silenced = lambda name, body: isinstance(body, m.Commit) and name.startswith("m4.")
    stage.kill_machine("m1")
    joiner = stage.name(1)
    assert stage.actors[joiner].prepared == 2
    stage.exit(stage.name(0))
    assert stage.state.generation == 3 and stage.name(1) == joiner


# --------------------------------------------------------------------------- budget and scripts


def test_each_incident_costs_one_of_the_budget() -> None:
    names = tuple(f"m{index}" for index in range(5))
    config = controller.Config(machine_names=names, standby_machines=1, max_incidents=3)
    stage = Stage(config=config).form()
    for _ in range(3):
        stage.gate(2)
        stage.break_to(stage.name(1))
        assert stage.phase == "Training"
    stage.gate(2)
    stage.break_to(stage.name(1))
    assert stage.ended is not None and stage.ended.code == exits.TOO_MANY_INCIDENTS


def script_failed(stage: Stage, rank: int, **changes: bool) -> m.ScriptFailed:
    known = {"was_running_out": False, "is_machine_caused": False, **changes}
    return m.ScriptFailed(
        incarnation=stage.name(rank),
        rank=rank,
        step=7,
        text="Traceback",
        error="OSError: [Errno 5]",
        **known,
    )


def test_an_exception_of_the_machine_moves_the_rank() -> None:
    stage = Stage().form()
    stage.gate(7)
    stage.worker(stage.name(2), script_failed(stage, 2, is_machine_caused=True))
    assert stage.phase == "Training" and stage.machine(2) == "m4"


def test_an_exception_while_running_out_respawns_in_place() -> None:
    stage = Stage().form()
    stage.gate(7)
    silence(stage, m.Freeze)
    stage.exit(stage.name(0))
    silence(stage)
    stage.worker(stage.name(2), script_failed(stage, 2, was_running_out=True))
    stage.wait(2)
    assert stage.phase == "Training"
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m1", "m2", "m3"]


def test_an_exception_of_the_script_ends_the_job_even_when_peers_broke_first() -> None:
    stage = Stage().form()
    stage.gate(7)
    silence(stage, m.Freeze)
    stage.break_to(stage.name(2))
    stage.worker(stage.name(2), script_failed(stage, 2))
    stage.wait(1)
    assert stage.ended is not None and stage.ended.code == exits.SCRIPT_FAILED
    assert stage.ended.reason.endswith("Traceback")


def test_two_dead_machines_of_which_peers_name_only_one_are_not_waited_for() -> None:
    stage = Stage(standby=2).form()
    stage.gate()
    silence(stage, m.Freeze)
    stage.kill_machine("m1")
    stage.dead.add("m3")
    stage.linked.discard("m3")
    for actor in [a for a in stage.actors.values() if a.machine == "m3"]:
        del stage.actors[actor.incarnation]
    stage.feed(controller.AgentUnlinked(machine="m3"))
    silence(stage)
    stage.wait(1.2, step_s=0.1)
    assert stage.phase == "Training"
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m4", "m2", "m5"]


def test_the_reason_names_the_connection_once_somebody_does() -> None:
    stage = Stage().form()
    stage.gate()
    silence(stage, m.Freeze)
    poisoned = stage.actors[stage.name(0)]
    stage.worker(poisoned.incarnation, poisoned.broken())
    assert "no connection named" in stage.state.incident.reason
    witness = stage.actors[stage.name(2)]
    witness.edges = (m.Edge(peer=stage.name(1), reason="reset"),)
    stage.worker(witness.incarnation, witness.broken())
    assert "connection to rank 1 failed (reset)" in stage.state.incident.reason
