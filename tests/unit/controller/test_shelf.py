"""Copies in agents' memory: where they go, when they are asked for, what may be dropped."""

from __future__ import annotations

from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, held, hold, say, sent, settle, sharded

from trainmover import controller
from trainmover.protocol import messages as m

NEVER = (("snapshot.cadence", "never"),)


def places(stage: Stage) -> dict[str, set[str]]:
    """As the latest orders say."""
    found: dict[str, set[str]] = {}
    for machine, order in sent(stage, m.PlaceBackups):
        found[machine] = {place.machine for each in order.orders for place in each.places}
    return found


def test_copies_are_placed_once_agents_say_where_they_listen() -> None:
    stage = sharded()
    assert all(held == set() for held in places(stage).values())
    settle(stage)
    orders = places(stage)
    assert set(orders) == {"m0", "m1", "m2", "m3"}
    for owner, holders in orders.items():
        assert len(holders) == 2 and owner not in holders
    (order,) = [o for n, o in sent(stage, m.PlaceBackups)[-4:] if n == "m2"]
    assert order.orders[0].rank == 2 and order.generation == 1
    assert (
        "fault domains are not known" in controller.status(stage.state, stage.now).snapshot_copies
    )


def test_labels_say_where_a_copy_has_to_lie() -> None:
    stage = Stage(machines=4, standby=0)
    labels = {"m0": "a", "m1": "a", "m2": "b", "m3": "b"}
    for name in stage.names:
        stage.labels[name] = tuple((level, labels[name]) for level in ("rack", "switch", "power"))
    stage.form()
    stage.wait(2)
    settle(stage)
    for owner, holders in places(stage).items():
        assert {labels[name] for name in holders} == {"a", "b"}, owner
    assert stage.state.kept.reasons == ()


def test_every_rank_is_asked_for_a_snapshot_after_a_commit_through_one_of_them() -> None:
    stage = sharded()
    asked = sent(stage, m.TakeSnapshot)
    assert [body.level for _, body in asked] == [1]
    stage.wait(6)
    assert len(sent(stage, m.TakeSnapshot)) == 2, "asked again until there is one"
    hold(stage, at(3))
    stage.wait(12)
    assert len(sent(stage, m.TakeSnapshot)) == 2
    stage.exit(stage.name(1))
    stage.gate()
    stage.wait(2)
    assert len(sent(stage, m.TakeSnapshot)) == 3, "copies are missing in the new generation"


def test_nothing_is_asked_for_where_snapshots_are_off() -> None:
    stage = sharded(settings=NEVER)
    settle(stage)
    stage.wait(10)
    assert sent(stage, m.TakeSnapshot) == [] and sent(stage, m.PlaceBackups) == []


def test_an_order_is_repeated_while_copies_are_missing() -> None:
    stage = sharded()
    settle(stage)
    before = len(sent(stage, m.PlaceBackups))
    for rank in range(4):
        say(stage, f"m{rank}", held(rank, at(2)))
    stage.wait(12)
    assert len(sent(stage, m.PlaceBackups)) > before
    hold(stage, at(2))
    stage.wait(12)
    settled = len(sent(stage, m.PlaceBackups))
    stage.wait(12)
    assert len(sent(stage, m.PlaceBackups)) == settled


def test_a_holder_that_is_lost_is_replaced() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    stage.wait(2)
    stage.kill_machine("m4")
    stage.wait(15)
    assert all("m4" not in holders for holders in places(stage).values())
    assert all(len(holders) == 2 for holders in places(stage).values())


def test_older_versions_go_only_once_a_newer_one_is_complete_with_its_copies() -> None:
    stage = sharded()
    settle(stage)
    assert controller.status(stage.state, stage.now).snapshot_copied_step == -1
    hold(stage, at(2))
    stage.wait(2)
    assert sent(stage, m.KeepSnapshots) == []
    assert controller.status(stage.state, stage.now).snapshot_copied_step == 2
    for rank in range(4):
        say(stage, f"m{rank}", held(rank, at(2)), held(rank, at(3)))
    stage.wait(2)
    assert sent(stage, m.KeepSnapshots) == [], "the copies of step 3 are not there yet"
    view = controller.status(stage.state, stage.now)
    assert (view.snapshot_step, view.snapshot_copied_step, view.snapshot_count) == (3, -1, 2)
    hold(stage, at(2), at(3))
    stage.wait(2)
    orders = sent(stage, m.KeepSnapshots)
    assert {machine for machine, _ in orders} == {"m0", "m1", "m2", "m3", "m4"}
    assert {order.oldest for _, order in orders} == {at(3)}
    hold(stage, at(3))
    count = len(sent(stage, m.KeepSnapshots))
    stage.wait(5)
    assert len(sent(stage, m.KeepSnapshots)) == count


def test_behind_a_roll_back_new_versions_are_kept_although_their_steps_are_lower() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    hold(stage, at(2), at(8))
    stage.wait(2)
    assert stage.state.kept.oldest == at(8)
    for name in ("m0", "m1", "m2", "m3", "m4"):
        say(
            stage,
            name,
            *[one for one in stage.state.kept.stores[name].held if one.version == at(2)],
        )
    stage.exit(stage.name(0))
    assert stage.state.target == at(2)
    number = stage.state.generation
    stage.gate()
    hold(stage, at(4, lineage=number))
    stage.wait(3)
    assert stage.state.kept.oldest <= at(4, lineage=number)
    hold(stage, at(2), at(4, lineage=number))
    stage.wait(3)
    assert sent(stage, m.KeepSnapshots)[-1][1].oldest == at(4, lineage=number)


def test_versions_that_can_never_be_complete_block_no_slot() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    say(stage, "m0", held(0, at(2)), held(0, at(4)), level=1)
    stage.wait(2)
    assert sent(stage, m.KeepSnapshots) == [], "the others may still take step 4"
    say(stage, "m1", held(1, at(2)), held(1, at(5)), level=1)
    stage.wait(2)
    orders = sent(stage, m.KeepSnapshots)
    assert {(machine, order.void) for machine, order in orders} == {("m0", (at(4),))}
    assert {order.oldest for _, order in orders} == {at(0, lineage=0)}


def test_a_snapshot_that_was_left_out_frees_the_others_slots() -> None:
    """Slots in turn: two ranks that are full at different times would never agree on a version."""
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    for rank in range(4):
        taken = [held(rank, at(2)), *([held(rank, at(4))] if rank else [])]
        say(stage, f"m{rank}", *taken, level=1)
    stage.wait(2)
    assert sent(stage, m.KeepSnapshots) == []
    name = stage.name(0)
    stage.worker(
        name, m.SnapshotFailed(incarnation=name, rank=0, version=at(4), reason="no free slot")
    )
    stage.wait(2)
    orders = sent(stage, m.KeepSnapshots)
    assert {machine for machine, order in orders if order.void == (at(4),)} == {"m1", "m2", "m3"}


def test_a_suspect_version_lets_no_good_one_go() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2), at(3), suspect=(at(3),))
    stage.wait(3)
    assert sent(stage, m.KeepSnapshots) == []


def test_two_complete_versions_are_enough_where_copies_never_arrive() -> None:
    stage = sharded()
    settle(stage)
    for rank in range(4):
        say(stage, f"m{rank}", *[held(rank, at(step)) for step in (2, 3, 4)])
    stage.wait(2)
    assert {order.oldest for _, order in sent(stage, m.KeepSnapshots)} == {at(3)}


def test_what_is_void_is_dropped_by_name() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2), at(4))
    hold(stage, at(2), without=("m4", "m3"))
    hold(stage, at(2), at(4), without=("m0", "m1", "m2"))
    stage.gate(3)
    stage.exit(stage.name(1))
    stage.gate()
    stage.wait(2)
    orders = sent(stage, m.KeepSnapshots)
    assert {machine for machine, order in orders if order.void == (at(4),)} == {"m3", "m4"}


def test_what_a_former_life_of_an_agent_held_is_gone() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    assert controller.status(stage.state, stage.now).snapshot_step == 2
    stage.agents["m1"] = "another"
    stage.hello("m1")
    assert "m1" not in stage.state.kept.stores
    assert controller.status(stage.state, stage.now).snapshot_step == 2, "copies are elsewhere"
    say(stage, "m1", held(1, at(2)))
    assert "m1" in stage.state.kept.stores


def test_a_message_of_another_life_of_an_agent_is_not_counted() -> None:
    stage = sharded()
    body = m.SnapshotsHeld(
        machine="m1", incarnation="an old one", host="h", port=7, held=(held(1, at(2)),)
    )
    stage.agent("m1", body)
    assert stage.state.kept.stores == {}


def test_copies_that_nobody_can_make_any_more_are_not_waited_for() -> None:
    """m0 has gone on to step 5 and step 3 of it is at one of two places: with steps 2 and 3 both
    kept, the other ranks could take nothing, and step 5 would never be complete."""
    stage = sharded()
    settle(stage)
    hold(stage, at(2), at(3))
    stage.wait(1)
    lacking = sorted(stage.state.kept.places["m0"])[0]
    lists = {name: stage.state.kept.stores[name].held for name in stage.names}
    stage = sharded()
    settle(stage)
    hold(stage, at(2))
    for name in stage.names:
        mine = [each for each in lists[name] if (each.rank, each.version) != (0, at(3))]
        if name == "m0":
            mine = [each for each in mine if each.rank != 0] + [held(0, at(5))]
        elif name != lacking:
            mine = list(lists[name])
        say(stage, name, *mine)
    stage.wait(2)
    assert stage.state.kept.oldest == at(3)
    assert any(order.oldest == at(3) for _, order in sent(stage, m.KeepSnapshots))
