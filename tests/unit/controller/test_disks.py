"""Checkpoints on machines' own disks first: who commits, what is copied, what failures cost."""

from __future__ import annotations

from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, hold, sent, settle, sharded

from trainmover import controller
from trainmover.protocol import journal
from trainmover.protocol import messages as m

TIERS = (("checkpoint.directory", "/checkpoints"), ("checkpoint.local_directory", "/local"))
MACHINES = ("m0", "m1", "m2", "m3")


def writing(**settings: str) -> Stage:
    """A complete version is being written to the disks of all machines."""
    more = tuple((f"checkpoint.{name}", value) for name, value in settings.items())
    stage = sharded(settings=(*TIERS, *more))
    settle(stage)
    hold(stage, at(2), level=2)
    stage.wait(1)
    return stage


def orders(stage: Stage) -> dict[str, m.WriteCheckpoint]:
    """The newest order of each machine."""
    return dict(sent(stage, m.WriteCheckpoint))


def write(stage: Stage, machine: str) -> None:
    order = orders(stage)[machine]
    shards = tuple(m.ShardWritten(rank=rank, record="{}") for rank in order.ranks)
    body = m.ShardsWritten(
        machine=machine, number=order.number, version=order.version, shards=shards, seconds=0.1
    )
    stage.agent(machine, body)


def commit(stage: Stage, machine: str, *, tier: m.Tier) -> None:
    order = dict(sent(stage, m.CommitCheckpoint))[machine]
    assert order.tier == tier
    body = m.CheckpointCommitted(
        machine=machine, number=order.number, version=order.version, name=f"at-{machine}", tier=tier
    )
    stage.agent(machine, body)


def fail(stage: Stage, machine: str, reason: str) -> None:
    order = orders(stage)[machine]
    body = m.CheckpointFailed(
        machine=machine, number=order.number, version=order.version, reason=reason
    )
    stage.agent(machine, body)


def on_disks(stage: Stage) -> None:
    """Every machine has written and committed its part."""
    for name in MACHINES:
        write(stage, name)
    for name in MACHINES:
        commit(stage, name, tier="disk")


def test_disks_first_by_all_at_once_then_copies_by_a_quarter() -> None:
    stage = writing()
    assert [order.tier for order in orders(stage).values()] == ["disk"] * 4, "each its own disk"
    on_disks(stage)
    (record,) = stage.recorded(journal.CheckpointKept)
    assert (record.tier, record.version) == ("disk", at(2))
    view = controller.status(stage.state, stage.now)
    assert (view.disk_step, view.checkpoint_step) == (2, -1)
    assert "copied from machines' disks" in view.checkpoint_state
    for count, name in enumerate(MACHINES, 1):
        copies = [o for _, o in sent(stage, m.WriteCheckpoint) if o.copied_from]
        assert len(copies) == count, "a quarter of four"
        assert copies[-1].copied_from == f"at-{name}"
        assert copies[-1].tier == "durable"
        write(stage, name)
    machine, order = sent(stage, m.CommitCheckpoint)[-1]
    assert (machine, order.tier, order.copied_from) == ("m0", "durable", "at-m0")
    commit(stage, "m0", tier="durable")
    view = controller.status(stage.state, stage.now)
    assert (view.checkpoint_step, view.checkpoint_state) == (2, "")


def test_memory_is_let_go_of_once_disks_have_it() -> None:
    stage = writing()
    hold(stage, at(2), at(5), level=1)
    stage.wait(2)
    before = [o.oldest for _, o in sent(stage, m.KeepSnapshots)]
    assert all(oldest <= at(2) for oldest in before), "it is being written"
    on_disks(stage)
    hold(stage, at(2), at(5), level=1)
    stage.wait(2)
    assert at(5) in [o.oldest for _, o in sent(stage, m.KeepSnapshots)], "a copy reads disks"


def test_a_full_disk_costs_the_disk_and_not_the_checkpoint() -> None:
    stage = writing()
    write(stage, "m0")
    fail(stage, "m1", "disk full")
    (missed,) = stage.recorded(journal.CheckpointMissed)
    assert (missed.tier, missed.reason) == ("disk", "m1: disk full")
    order = orders(stage)["m0"]
    assert (order.tier, order.copied_from, order.number) == ("durable", "", 2), "from memory"
    for name in MACHINES:
        write(stage, name)
    commit(stage, "m0", tier="durable")
    view = controller.status(stage.state, stage.now)
    assert (view.checkpoint_step, view.checkpoint_state) == (2, "")
    assert "disk full" in view.disk_failure


def test_a_copy_that_fails_is_tried_again_then_memory_is_written() -> None:
    stage = writing()
    on_disks(stage)
    fail(stage, "m0", "vanished")
    assert orders(stage)["m0"].copied_from == "at-m0", "again"
    fail(stage, "m0", "vanished")
    last = orders(stage)["m0"]
    assert (last.copied_from, last.tier) == ("", "durable"), "memory still has it"
    fail(stage, "m0", "vanished")
    assert stage.state.kept.writing is None and stage.phase == "Training"
    view = controller.status(stage.state, stage.now)
    assert (view.disk_step, view.checkpoint_step) == (2, -1)
    assert "vanished" in view.checkpoint_state


def test_a_storage_that_hangs_does_not_keep_newer_ones_from_the_disks() -> None:
    stage = writing(write_timeout_s="5.0")
    on_disks(stage)
    hold(stage, at(2), at(6), level=2)
    stage.wait(8)
    newest = orders(stage)["m0"]
    assert (newest.version, newest.tier) == (at(6), "disk"), "the copy was not tried again"


def test_a_machine_lost_while_its_disk_is_copied_is_passed_by() -> None:
    stage = writing()
    on_disks(stage)
    write(stage, "m0")
    stage.kill_machine("m1")
    stage.wait(15)
    assert stage.phase == "Training"
    assert stage.state.generation == 2
    assert any("m1" in each.reason for each in stage.recorded(journal.CheckpointMissed))


def test_late_news_of_a_disk_is_no_news_of_the_storage() -> None:
    stage = writing()
    on_disks(stage)
    order = dict(sent(stage, m.CommitCheckpoint))["m3"]
    stage.crash()
    stage.wait(3)
    late = m.CheckpointCommitted(
        machine="m3", number=order.number, version=at(2), name="at-m3", tier="disk"
    )
    stage.agent("m3", late)
    kept = stage.state.kept
    assert kept.durable is None
    assert kept.on_disk is not None and kept.on_disk.version == at(2), "from the journal"


def test_where_a_job_comes_from_is_kept_and_told_with_each_commit() -> None:
    version = at(7)
    restored = controller.Restored(
        name="step-7", version=version, run_id="before", history=("before", "first")
    )
    stage = Stage(settings=TIERS[:1], restored=restored)
    for name in stage.names:
        stage.hello(name)
    (chosen,) = stage.recorded(journal.StartChosen)
    assert (chosen.name, chosen.run_id) == ("step-7", "before")
    stage.crash()
    assert stage.state.kept.history == ("before", "first")
    assert stage.state.kept.begun_from == "before"


def last_on_disks_only(stage: Stage, *, is_stopped: bool) -> None:
    """Step 3 is the last; each machine's disk takes its part, the storage nothing."""
    settle(stage)
    hold(stage, at(3), level=3)
    for member in stage.members():
        stage.actors[member.incarnation].version = at(3)
    stage.finish(is_stopped=is_stopped)
    stage.wait(1)
    on_disks(stage)
    while stage.state.kept.writing is not None:
        fail(stage, "m0", "disk full")
    stage.wait(20)


def test_an_end_that_only_disks_have_is_said_to_be_there() -> None:
    stage = sharded(settings=TIERS)
    last_on_disks_only(stage, is_stopped=False)
    assert stage.ended is not None and stage.ended.code == 12
    expected = (
        "step 3, its last, is on machines' own disks only (at-m0; in the storage there is none"
    )
    assert expected in stage.ended.reason
    assert "disk full" in stage.ended.reason


def test_a_stop_that_only_disks_have_can_go_on_from_them() -> None:
    stage = sharded(settings=TIERS)
    stage.operator(m.StopRequest(request="q", mode="boundary"))
    last_on_disks_only(stage, is_stopped=True)
    assert stage.ended is not None and stage.ended.code == 11
    assert "on machines' own disks only, not in the storage (checkpoint" in stage.ended.reason
    assert "disk full" in stage.ended.reason
