"""Losses of state that has no replica but whose updates are held: nobody else goes back."""

from __future__ import annotations

from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, hold, plan, settle, sharded

from trainmover.controller import sources
from trainmover.protocol import messages as m

ON = (("snapshot.increments", "auto"),)


def backed_up(since: m.Version | None, **options: object) -> Stage:
    """Steps 2 to 5 have passed; version 2 is in memory; updates are held from `since`."""
    stage = sharded(settings=ON, **options)
    settle(stage)
    hold(stage, at(2))
    stage.gate(3)
    for actor in stage.actors.values():
        actor.replay_from = since
    return stage


def test_a_lost_rank_is_played_again_and_nobody_goes_back() -> None:
    stage = backed_up(at(1))
    lost = stage.name(2)
    stage.exit(lost)
    made = plan(stage)
    assert not made.is_rollback
    assert made.target == at(5)
    (source,) = made.sources
    assert (source.kind, source.rank, source.base) == ("increments", 2, at(2))
    assert source.machine in stage.names
    assert source.port == 7
    assert {source.bulk_from, source.own_from, source.shared_from}.isdisjoint({lost, ""})
    stage.gate()
    stage.wait(3)
    (report,) = stage.state.closed
    assert report.kind in {"respawn", "standby"}
    assert report.steps_repeated == 1
    assert [role.source for role in report.roles if role.rank == 2] == ["increments"]


def test_updates_that_begin_behind_the_snapshot_are_of_no_use() -> None:
    stage = backed_up(at(3))
    stage.exit(stage.name(2))
    assert plan(stage).is_rollback
    assert plan(stage).target == at(2)


def test_a_snapshot_of_the_very_version_needs_no_updates() -> None:
    stage = backed_up(None)
    hold(stage, at(5))
    stage.exit(stage.name(2))
    assert not plan(stage).is_rollback
    assert [source.base for source in plan(stage).sources] == [at(5)]


def test_without_the_setting_all_go_back_as_ever() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.gate(3)
    for actor in stage.actors.values():
        actor.replay_from = at(1)
    stage.exit(stage.name(2))
    assert plan(stage).is_rollback


def test_a_copy_that_can_not_be_loaded_gives_way_to_another() -> None:
    stage = backed_up(at(1))
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    stage.exit(stage.name(2))
    first = plan(stage)
    (source,) = first.sources
    joiner = first.joiners[0]
    edge = m.Edge(peer=source.machine, reason="the snapshot was overwritten")
    stage.silenced = lambda name, body: False
    stage.worker(joiner, m.Lost(incarnation=joiner, number=first.number, edge=edge))
    stage.wait(3)
    second = plan(stage)
    assert second.number > first.number
    assert not second.is_rollback
    assert second.sources[0].machine != source.machine


def test_updates_that_give_another_state_send_all_back() -> None:
    stage = backed_up(at(1))
    stage.silenced = lambda name, body: isinstance(body, m.PlanIssued)
    stage.exit(stage.name(2))
    first = plan(stage)
    joiner = first.joiners[0]
    edge = m.Edge(peer="", reason="playing the updates again gave other parameters")
    stage.silenced = lambda name, body: False
    stage.worker(joiner, m.Lost(incarnation=joiner, number=first.number, edge=edge))
    stage.wait(3)
    second = plan(stage)
    assert second.number > first.number
    assert second.is_rollback
    assert second.target == at(2)


def test_a_live_replica_comes_before_updates() -> None:
    stage = backed_up(at(1))
    for member in stage.members():
        stage.actors[member.incarnation].identity = "all"
        body = m.Tracked(
            incarnation=member.incarnation, rank=member.rank, identity="all", names_digest=1
        )
        stage.worker(member.incarnation, body)
    stage.exit(stage.name(2))
    assert [source.kind for source in plan(stage).sources] == ["replica"]


def test_the_newest_snapshot_that_updates_reach_is_taken() -> None:
    report = m.Report(
        incarnation="w1",
        number=2,
        generation=1,
        rank=1,
        applied=at(6),
        personal=(m.Held(owner_rank=0, version=at(6), is_final=True, replay_from=at(3)),),
    )
    stayer = sources.stayer(1, report, 1, at(0), "shard 1")

    def base(step: int) -> sources.Base:
        return sources.Base(version=at(step), machine=f"m{step}", host="h", port=1)

    def chosen(*steps: int) -> list[int]:
        bases = tuple(base(step) for step in steps)
        found = sources.choose({0: "shard 0"}, (stayer,), at(6), {0: bases})
        return [source.base.step for source in found.sources if source.base is not None]

    assert chosen(5, 3, 1) == [5]
    assert chosen(3, 1) == [3]
    assert chosen(2, 1) == []
    assert chosen() == []
