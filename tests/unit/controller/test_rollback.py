"""Losses of state that has no replica: everyone goes back to one snapshot, or to a checkpoint."""

from __future__ import annotations

from msgspec import structs
from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, held, hold, plan, say, sent, settle, sharded, track

from trainmover import controller
from trainmover.protocol import exits, journal
from trainmover.protocol import messages as m


def test_without_a_live_replica_all_roll_back_to_the_newest_complete_version() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(1), at(2))
    stage.gate(3)
    stage.exit(stage.name(2))
    made = plan(stage)
    assert made.is_rollback and made.target == at(2) and made.kind == "unplanned"
    assert [source.rank for source in made.sources] == [0, 1, 2, 3]
    assert {source.kind for source in made.sources} == {"snapshot"}
    assert [source.machine for source in made.sources] == ["m0", "m1", "m2", "m3"]
    assert all(source.host == source.machine and source.port == 7 for source in made.sources)
    assert stage.phase == "Training" and stage.state.target == at(2)
    stage.gate()
    stage.wait(3)
    (report,) = stage.state.closed
    assert report.kind == "rollback" and report.resumed_step == 2
    assert report.steps_repeated == 4, "steps 2, 3, 4 and the one under way"
    assert {role.source for role in report.roles} == {"snapshot"}


def test_with_a_live_replica_nobody_rolls_back() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    for member in stage.members():
        stage.actors[member.incarnation].identity = "all"
        body = m.Tracked(
            incarnation=member.incarnation, rank=member.rank, identity="all", names_digest=1
        )
        stage.worker(member.incarnation, body)
    stage.gate(3)
    stage.exit(stage.name(2))
    assert not plan(stage).is_rollback and plan(stage).target == at(5)


def test_ranks_that_pass_for_replicas_and_hold_other_values_are_none() -> None:
    """Experts of one name, built from one seed on every rank: alike until the first step."""
    stage = sharded()
    settle(stage)
    for member in stage.members():
        stage.actors[member.incarnation].identity = "all"
        body = m.Tracked(
            incarnation=member.incarnation, rank=member.rank, identity="all", names_digest=1
        )
        stage.worker(member.incarnation, body)
        one = structs.replace(held(member.rank, at(2)), identity="all", bulk_digest=member.rank + 1)
        say(stage, member.machine, one)
    stage.gate(3)
    stage.exit(stage.name(2))
    assert plan(stage).is_rollback and plan(stage).target == at(2)
    assert {source.kind for source in plan(stage).sources} == {"snapshot"}


def test_a_lost_machine_is_restored_from_copies_elsewhere() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.kill_machine("m2")
    stage.wait(12)
    made = plan(stage)
    assert made.is_rollback and made.target == at(2)
    assert made.membership.members[2].machine == "m4"
    (source,) = [source for source in made.sources if source.rank == 2]
    assert source.machine != "m2" and source.machine in stage.names
    assert source.machine == "m4" or "m4" not in stage.state.kept.places["m2"]


def test_an_own_copy_is_preferred_and_a_version_has_to_be_the_same_for_all() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2), without=("m3",))
    say(stage, "m3", held(3, at(3)))
    for name in ("m0", "m1", "m2", "m4"):
        say(stage, name, *[held(int(name[1:]) % 4, at(2)), held(int(name[1:]) % 4, at(3))])
    assert controller.status(stage.state, stage.now).snapshot_step == 3
    stage.exit(stage.name(0))
    assert plan(stage).target == at(3)


def test_equal_steps_of_two_lineages_are_two_versions() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(1))
    stage.wait(2)
    hold(stage, at(2), without=("m3",))
    say(stage, "m3", held(3, at(2, lineage=2)))
    for name in stage.names[:3]:
        say(stage, name, held(int(name[1:]), at(2)))
    say(stage, "m4")
    stage.exit(stage.name(0))
    stage.wait(8)
    assert stage.ended is not None and stage.ended.code == exits.CANNOT_RESTORE


def test_before_the_first_snapshot_is_complete_all_begin_again() -> None:
    stage = sharded()
    settle(stage)
    stage.exit(stage.name(2))
    made = plan(stage)
    assert made.is_fresh_start and not made.restore and made.target.step == 0
    stage.gate()
    stage.wait(3)
    assert stage.state.closed[-1].kind == "fresh_start"
    assert stage.state.closed[-1].steps_repeated == 2


def test_nothing_kept_stops_and_names_the_ranks() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(1))
    stage.wait(2)
    for name in stage.names:
        say(stage, name)
    stage.exit(stage.name(2))
    stage.wait(6)
    assert stage.ended is not None and stage.ended.code == exits.CANNOT_RESTORE
    assert "rank 2" in stage.ended.reason and "no snapshot" in stage.ended.reason


def test_a_suspect_version_is_taken_only_if_it_is_alone() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(1), at(2), suspect=(at(2),))
    stage.exit(stage.name(0))
    assert plan(stage).target == at(1)
    stage = sharded()
    settle(stage)
    hold(stage, at(2), suspect=(at(2),))
    stage.exit(stage.name(0))
    assert plan(stage).target == at(2)


def test_versions_of_a_time_line_that_was_left_are_void() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2), at(4))
    # One rank's copy of the newer one has gone with its machine's agent.
    hold(stage, at(2), without=("m4",))
    stage.gate(3)
    stage.exit(stage.name(1))
    assert plan(stage).target == at(2)
    track(stage)
    hold(stage, at(2), at(4))
    assert controller.status(stage.state, stage.now).snapshot_step == 2
    stage.exit(stage.name(0))
    assert plan(stage).target == at(2), "step 4 of generation 1 never was"
    track(stage)
    number = stage.state.generation
    hold(stage, at(2), at(4, lineage=number))
    stage.exit(stage.name(0))
    assert plan(stage).target == at(4, lineage=number)


def test_what_is_void_outlives_the_controller() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate(3)
    stage.exit(stage.name(1))
    assert plan(stage).is_rollback
    stage.crash()
    assert stage.state.kept.is_void(at(3)) and not stage.state.kept.is_void(at(2))
    assert not stage.state.kept.is_void(at(3, lineage=2))


def test_a_restarted_controller_hears_what_is_held_before_it_gives_up() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.crash_at = "detected"
    stage.exit(stage.name(1))
    assert stage.phase == "Freezing" and stage.ended is None
    stage.wait(3)
    assert stage.phase == "Freezing"
    hold(stage, at(2))
    stage.wait(3)
    assert plan(stage).is_rollback and stage.phase == "Training"


def test_a_restarted_controller_that_hears_nothing_gives_up_in_the_end() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.crash_at = "detected"
    stage.exit(stage.name(1))
    stage.wait(20)
    assert stage.ended is not None and stage.ended.code == exits.CANNOT_RESTORE


def test_every_worker_lost_but_their_agents_alive() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.silenced = lambda name, body: isinstance(body, m.Freeze)
    for rank in range(4):
        stage.exit(stage.name(rank))
    stage.silenced = lambda name, body: False
    stage.wait(70)
    made = plan(stage)
    assert made.is_rollback and len(made.joiners) == 4 and made.attempts == 2


def test_a_half_rolled_back_member_takes_part_in_the_next_rollback() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    stage.exit(stage.name(1))
    assert stage.phase == "Switching"
    stage.silenced = lambda name, body: False
    for rank in (0, 2, 3):
        actor = stage.actors[stage.name(rank)]
        actor.broken_state = "half rolled back to step 2"
        actor.is_half_rolled_back = True
    joiner = plan(stage).joiners[0]
    stage.exit(joiner)
    made = plan(stage)
    assert made.is_rollback and len(made.joiners) == 1, "nobody is replaced for being half way"
    assert stage.phase == "Training"


def test_a_snapshot_server_that_has_gone_is_replaced_in_the_next_plan() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    stage.kill_machine("m2")
    stage.wait(2)
    first = plan(stage)
    source = next(each for each in first.sources if each.rank == 2)
    assert stage.phase == "Switching"
    joiner = first.joiners[0]
    edge = m.Edge(peer=source.machine, reason="its bytes are not what was announced")
    stage.silenced = lambda name, body: False
    stage.worker(joiner, m.Lost(incarnation=joiner, number=first.number, edge=edge))
    assert plan(stage).number > first.number
    other = next(each for each in plan(stage).sources if each.rank == 2)
    assert other.machine != source.machine and stage.phase == "Training"


def test_where_every_copy_has_failed_once_they_are_tried_again() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate()
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    stage.exit(stage.name(2))
    seen = []
    for _ in range(4):
        (source,) = [each for each in plan(stage).sources if each.rank == 2]
        seen.append(source.machine)
        edge = m.Edge(peer=source.machine, reason="no route")
        joiner = plan(stage).membership.members[2].incarnation
        body = m.Lost(incarnation=joiner, number=plan(stage).number, edge=edge)
        stage.worker(joiner, body)
        stage.wait(2)
    assert len(set(seen[:3])) == 3 and seen[3] in seen[:3] and stage.ended is None


def test_a_joiner_that_dies_right_behind_the_commit_costs_no_step() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    asked = len(sent(stage, m.TakeSnapshot))
    stage.operator(m.SwitchoverRequest(request="q", machines=("m1",)))
    bodies = [body for _, body in sent(stage, m.TakeSnapshot | m.RaiseFlag)][asked:]
    assert [type(body) for body in bodies] == [m.TakeSnapshot, m.RaiseFlag] * 4
    assert stage.machine(1) == "m4" and stage.state.target == at(3)
    for rank in (0, 2, 3):
        say(stage, f"m{rank}", held(rank, at(3)))
    say(stage, "m1", held(1, at(3)))
    say(stage, "m4")
    stage.exit(stage.name(1))
    made = plan(stage)
    assert made.is_rollback and made.target == at(3), "the version at which the leaver left"
    assert made.sources[1].machine == "m1"


def test_a_leaver_with_replicas_costs_no_snapshot() -> None:
    stage = Stage().form()
    settle(stage)
    stage.wait(2)
    asked = len(sent(stage, m.TakeSnapshot))
    stage.operator(m.SwitchoverRequest(request="q", machines=("m1",)))
    assert len(sent(stage, m.TakeSnapshot)) == asked and stage.state.generation == 2


# --------------------------------------------------------------------------- durable


RESTORED = controller.Restored(name="step-00000120", version=m.Version(step=120, lineage=3))


def test_a_restarted_job_starts_from_its_checkpoint() -> None:
    stage = sharded(restored=RESTORED)
    form = stage.recorded(journal.PlanRecorded)[0].plan
    assert form.is_fresh_start and form.restore == RESTORED.name
    assert form.target == RESTORED.version and form.number > 3
    assert stage.state.target.step == 120


def test_a_loss_while_the_checkpoint_is_loaded_starts_it_again() -> None:
    stage = sharded_building()
    stage.exit(stage.name(1))
    made = plan(stage)
    assert made.is_fresh_start and made.restore == RESTORED.name and made.target.step == 120


def sharded_building():
    from tests.unit.controller.play import Stage

    stage = Stage(restored=RESTORED)
    for name in stage.names:
        stage.hello(name)
    for actor in stage.actors.values():
        actor.is_building = True
    return stage


def test_without_any_snapshot_all_start_from_the_newest_checkpoint() -> None:
    stage = sharded(restored=RESTORED)
    settle(stage)
    stage.gate(3)
    stage.exit(stage.name(1))
    made = plan(stage)
    assert made.is_fresh_start and made.restore == RESTORED.name and not made.is_rollback
    assert made.target == RESTORED.version and stage.phase == "Training"
    stage.gate()
    stage.wait(3)
    assert stage.state.closed[-1].kind == "restored"


def test_what_is_newer_wins_between_memory_and_storage() -> None:
    stage = sharded(restored=RESTORED)
    settle(stage)
    number = stage.state.generation
    hold(stage, at(122, lineage=number))
    stage.gate(3)
    stage.exit(stage.name(1))
    assert plan(stage).is_rollback and plan(stage).target == at(122, lineage=number)
