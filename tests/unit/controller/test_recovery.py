"""Stories of unplanned losses: every rung of the ladder, and what can't be saved."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.controller.play import Stage

from trainmover import controller
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m


def silence(stage: Stage, *kinds: type) -> None:
    stage.silenced = lambda name, body: isinstance(body, kinds)


def plan(stage: Stage) -> m.Plan:
    return stage.recorded(journal.PlanRecorded)[-1].plan


# --------------------------------------------------------------------------- respawn in place


def test_a_killed_worker_is_respawned_in_place_and_the_standby_stays() -> None:
    stage = Stage().form()
    stage.gate(4)
    lost = stage.name(2)
    stage.exit(lost)
    assert stage.phase == "Training" and stage.state.generation == 2
    assert stage.machine(2) == "m2" and stage.name(2) != lost
    assert plan(stage).target == m.Version(step=5, lineage=1)
    (source,) = plan(stage).sources
    assert source.rank == 2 and source.own_from != source.rank
    stage.gate()
    stage.wait(3)
    (report,) = stage.state.closed
    assert report.kind == "respawn" and report.steps_repeated == 1
    assert report.culprits[0].rank == 2 and "signal 9" in report.culprits[0].evidence
    assert [p.name for p in report.phases][:2] == ["detected", "frozen"]
    assert any(w.is_ready for w in controller.status(stage.state, stage.now).standbys)


def test_peers_notice_before_the_agent_and_it_is_still_one_incident() -> None:
    stage = Stage().form()
    stage.gate()
    lost = stage.name(2)
    silence(stage, m.Freeze)
    stage.break_to(lost)
    assert stage.phase == "Freezing"
    silence(stage)
    stage.exit(lost)
    stage.wait(2)
    assert stage.phase == "Training" and stage.state.incident_count == 1
    assert stage.machine(2) == "m2"


def test_a_worker_that_does_not_report_is_killed_and_respawned() -> None:
    stage = Stage().form()
    stage.gate()
    lost = stage.name(1)
    stage.actors[lost].is_stopped = True
    stage.break_to(lost)
    assert stage.phase == "Freezing"
    stage.wait(6)
    assert stage.phase == "Training" and stage.name(1) != lost and lost not in stage.actors
    kills = [b.incarnation for _, b in stage.sent if isinstance(b, m.KillWorker)]
    assert lost in kills


def test_a_stopped_worker_is_found_by_its_process_state() -> None:
    stage = Stage().form()
    stage.gate()
    lost = stage.name(1)
    stage.actors[lost].is_stopped = True
    stage.wait(2)
    assert stage.state.generation == 1
    stage.wait(5)
    assert stage.state.generation == 2 and stage.machine(1) == "m1"
    assert "was stopped" in stage.state.incident.culprits[0].evidence


def test_respawns_that_fail_again_and_again_lead_to_the_standby() -> None:
    stage = Stage().form()
    for count in range(4):
        assert stage.machine(2) == "m2", count
        stage.exit(stage.name(2))
        assert stage.phase == "Training"
    assert stage.machine(2) == "m4"


def test_a_state_touched_by_a_dropped_value_is_replaced() -> None:
    stage = Stage().form()
    stage.gate()
    lost = stage.name(3)
    stage.actors[lost].broken_state = "ema.weight"
    stage.break_to(stage.name(0))
    assert stage.phase == "Training"
    assert stage.name(3) != lost and stage.machine(3) == "m3"
    assert "ema.weight" in stage.state.incident.culprits[0].evidence


# --------------------------------------------------------------------------- version and hold


def test_held_ranks_apply_when_one_has_passed() -> None:
    stage = Stage().form()
    stage.gate(2)
    for rank in (0, 1, 3):
        stage.actors[stage.name(rank)].has_entered = True
    ahead = stage.actors[stage.name(3)]
    ahead.version, ahead.has_entered = m.Version(step=4, lineage=1), False
    stage.exit(stage.name(2))
    assert plan(stage).target == m.Version(step=4, lineage=1)
    assert plan(stage).result == (0, 0, 1, 0, 0, 0, 0, 0)
    assert plan(stage).sources[0].bulk_from == ahead.incarnation
    assert plan(stage).attempts == 3
    assert not plan(stage).renews_buckets


@pytest.mark.parametrize("who", ["stayer", "joiner", "too warm"])
def test_all_start_over_where_buckets_may_differ(who: str) -> None:
    """Decision 0013; too warm: the joiner has to enter `main` again, whatever it was."""
    stage = Stage().form()
    stage.gate()
    if who == "stayer":
        stage.actors[stage.name(3)].has_first_buckets = True
    else:
        standby = next(a for a in stage.actors.values() if a.machine == "m4")
        said = msgspec.structs.replace(
            standby.ready(0),
            attempts=9 if who == "too warm" else 2,
            has_first_buckets=who == "joiner",
        )
        stage.worker(standby.incarnation, said)
    stage.kill_machine("m1")
    assert stage.machine(1) == "m4" and plan(stage).renews_buckets


def test_a_rank_behind_that_has_not_entered_contradicts_the_protocol() -> None:
    stage = Stage().form()
    stage.gate(2)
    stage.actors[stage.name(3)].version = m.Version(step=4, lineage=1)
    stage.exit(stage.name(2))
    assert stage.ended is not None and stage.ended.code == exits.PROTOCOL_FAILED
    assert "not entered" in stage.ended.reason


# --------------------------------------------------------------------------- standby


def test_a_dead_machine_is_replaced_by_the_standby_without_waiting() -> None:
    stage = Stage().form()
    stage.gate()
    stage.kill_machine("m1")
    assert stage.phase == "Training" and stage.machine(1) == "m4"
    stage.gate()
    stage.wait(3)
    assert stage.state.closed[-1].culprits[0].evidence == "m1 is gone: its link has closed"
    assert stage.state.closed[-1].kind == "standby"


def test_two_machines_at_once_are_one_incident() -> None:
    stage = Stage(standby=2).form()
    stage.gate()
    silence(stage, m.Freeze)
    stage.kill_machine("m1")
    stage.kill_machine("m3")
    silence(stage)
    stage.wait(3)
    assert stage.phase == "Training"
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m4", "m2", "m5"]
    assert stage.state.incident_count == 1
    sources = plan(stage).sources
    assert len({source.bulk_from for source in sources}) == 2, "drawn from different replicas"


def test_a_machine_with_two_workers_moves_together() -> None:
    stage = Stage(machines=2, standby=2, workers_per_machine=2).form()
    stage.gate()
    stage.kill_machine("m1")
    stage.wait(6)
    assert [stage.machine(rank) for rank in range(4)] == ["m0", "m0", "m2", "m2"]
    assert [stage.actors[stage.name(rank)].local_rank for rank in range(4)] == [0, 1, 0, 1]


def test_a_machine_that_comes_back_is_the_new_standby_and_its_old_worker_is_killed() -> None:
    stage = Stage().form()
    stage.gate()
    old = stage.actors[stage.name(1)]
    stage.kill_machine("m1")
    assert stage.machine(1) == "m4"
    stage.actors[old.incarnation] = old
    stage.hello("m1")
    assert old.incarnation not in stage.actors
    assert [w.machine for w in stage.actors.values() if w.rank < 0] == ["m1"]


def test_silence_without_gates_is_a_loss_and_with_gates_is_none() -> None:
    stage = Stage().form()
    stage.linked.discard("m1")
    for _ in range(15):
        stage.gate()
        stage.wait(1)
    assert stage.state.generation == 1, "gates prove life (C7)"
    stage.wait(17)
    assert stage.state.generation == 2 and stage.machine(1) == "m4"


def test_when_everybody_is_silent_the_controller_suspects_itself() -> None:
    stage = Stage().form()
    linked = set(stage.linked)
    stage.linked.clear()
    stage.wait(40)
    assert stage.phase == "Training" and stage.state.generation == 1
    stage.linked |= linked
    stage.gate()
    stage.wait(3)
    assert stage.state.generation == 1


def test_once_everybody_has_given_up_the_controller_does_not_wait_on() -> None:
    stage = Stage().form()
    stage.linked.clear()
    stage.wait(350)
    assert stage.phase == "Training"
    stage.wait(20)
    assert stage.ended is not None and stage.ended.code == 6
    assert "no agent was heard for 360 s" in stage.ended.reason


def test_a_restarted_agent_adopts_and_nothing_happens() -> None:
    stage = Stage().form()
    stage.gate()
    stage.feed(controller.AgentUnlinked(machine="m2"))
    stage.linked.discard("m2")
    stage.wait(3)
    stage.hello("m2")
    stage.gate()
    stage.wait(3)
    assert stage.state.generation == 1 and stage.state.incident_count == 0


def test_a_standby_with_other_collectives_is_not_used() -> None:
    stage = Stage().form()
    stage.gate()
    standby = next(a for a in stage.actors.values() if a.machine == "m4")
    other = m.StandbyReady(
        incarnation=standby.incarnation,
        as_rank=0,
        identity="all",
        attempts=2,
        sequence_digest="other",
        can_adopt_in_place=True,
    )
    stage.worker(standby.incarnation, other)
    stage.kill_machine("m1")
    assert stage.phase == "Gathering"


# --------------------------------------------------------------------------- fresh machine, none


def test_without_a_standby_a_fresh_machine_is_waited_for() -> None:
    stage = Stage(standby=0).form()
    stage.gate()
    stage.kill_machine("m1")
    assert stage.phase == "Gathering"
    stage.wait(30)
    stage.hello("m7")
    assert stage.phase == "Training" and stage.machine(1) == "m7"


def test_without_any_machine_the_job_stops_and_names_the_ranks() -> None:
    stage = Stage(standby=0).form()
    stage.gate()
    stage.kill_machine("m1")
    stage.wait(70)
    assert stage.ended is not None and stage.ended.code == exits.NO_MACHINE
    assert "rank 1" in stage.ended.reason


def test_lost_state_without_replica_stops_and_names_the_ranks() -> None:
    stage = Stage()
    for name in stage.names:
        stage.hello(name)
    for actor in list(stage.actors.values()):
        if actor.rank >= 0:
            actor.identity = f"shard {actor.rank}"
            tracked = m.Tracked(
                incarnation=actor.incarnation,
                rank=actor.rank,
                identity=actor.identity,
                names_digest=1,
            )
            stage.worker(actor.incarnation, tracked)
    stage.gate(2)
    stage.exit(stage.name(2))
    assert stage.ended is not None and stage.ended.code == exits.CANNOT_RESTORE
    assert "rank 2: no live replica" in stage.ended.reason


def test_personal_state_that_nobody_holds_stops_the_job() -> None:
    stage = Stage().form()
    stage.gate(2)
    for actor in stage.actors.values():
        actor.holds_for = ()
    stage.exit(stage.name(2))
    assert stage.ended is not None and stage.ended.code == exits.CANNOT_RESTORE
    assert "personal state" in stage.ended.reason


def test_a_loss_while_main_is_built_starts_afresh() -> None:
    stage = Stage()
    for name in stage.names:
        stage.hello(name)
    for actor in stage.actors.values():
        actor.is_building = True
    stage.exit(stage.name(2))
    assert stage.phase == "Training" and stage.state.generation == 2
    assert plan(stage).is_fresh_start and plan(stage).sources == ()


def test_a_loss_at_step_0_without_copies_starts_afresh_too() -> None:
    stage = Stage()
    for name in stage.names:
        stage.hello(name)
    for actor in stage.actors.values():
        actor.holds_for = ()
    stage.exit(stage.name(2))
    assert plan(stage).is_fresh_start and stage.phase == "Training"


# --------------------------------------------------------------------------- reconnect


def flap(stage: Stage, a: int, b: int) -> None:
    actor = stage.actors[stage.name(a)]
    actor.edges = (m.Edge(peer=stage.name(b), reason="reset"),)
    stage.worker(actor.incarnation, actor.broken())


def test_a_link_flap_reconnects_and_replaces_nobody() -> None:
    stage = Stage().form()
    stage.gate()
    before = [stage.name(rank) for rank in range(4)]
    flap(stage, 1, 3)
    assert stage.state.generation == 2 and plan(stage).joiners == ()
    assert [stage.name(rank) for rank in range(4)] == before
    stage.gate()
    stage.wait(3)
    assert stage.state.closed[-1].kind == "reconnect"


def test_an_edge_that_stays_broken_costs_one_of_its_ends() -> None:
    stage = Stage().form()
    stage.gate()
    for _ in range(4):
        flap(stage, 1, 3)
    assert stage.phase == "Training"
    moved = [rank for rank in range(4) if stage.machine(rank) == "m4"]
    assert moved in ([1], [3])


def test_a_gate_that_waits_too_long_without_an_edge_is_bounded() -> None:
    stage = Stage().form()
    stage.gate()
    for _ in range(4):
        actor = stage.actors[stage.name(0)]
        stage.worker(actor.incarnation, actor.broken())
    assert stage.ended is not None and stage.ended.code == exits.TOO_MANY_INCIDENTS


def test_a_process_that_can_not_be_reaped_in_time_costs_the_standby() -> None:
    stage = Stage().form()
    stage.gate()
    lost = stage.name(2)
    stage.actors[lost].broken_state = "ema"
    silence(stage, m.KillWorker)
    stage.break_to(stage.name(0))
    assert stage.phase == "Gathering"
    stage.wait(9)
    assert stage.phase == "Gathering"
    stage.wait(3)
    assert stage.phase == "Training" and stage.machine(2) == "m4"
