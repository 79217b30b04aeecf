"""Checkpoints of complete snapshots: who writes, when one counts, what failures cost; suspend."""

from __future__ import annotations

from tests.unit.controller.play import Stage
from tests.unit.controller.shelves import at, hold, say, sent, settle, sharded

from trainmover import controller
from trainmover.protocol import journal
from trainmover.protocol import messages as m

DURABLE = (("checkpoint.directory", "/checkpoints"),)


def writing(share: str = "1.0") -> Stage:
    stage = sharded(settings=(*DURABLE, ("checkpoint.parallel_machines_share", share)))
    settle(stage)
    hold(stage, at(2), level=2)
    stage.wait(1)
    return stage


def answer(stage: Stage, machine: str) -> None:
    order = next(o for n, o in reversed(sent(stage, m.WriteCheckpoint)) if n == machine)
    shards = tuple(m.ShardWritten(rank=rank, record="{}") for rank in order.ranks)
    body = m.ShardsWritten(
        machine=machine, number=order.number, version=order.version, shards=shards, seconds=0.1
    )
    stage.agent(machine, body)


def commit(stage: Stage) -> m.CommitCheckpoint:
    machine, order = sent(stage, m.CommitCheckpoint)[-1]
    body = m.CheckpointCommitted(
        machine=machine, number=order.number, version=order.version, name="step-2"
    )
    stage.agent(machine, body)
    return order


def save(stage: Stage) -> None:
    """Every machine that is not dead writes when its turn comes, then one commits."""
    for _ in range(4):
        for name in sorted(set(stage.names) - stage.dead):
            if name in stage.state.kept.writing.busy:
                answer(stage, name)
    commit(stage)


def test_a_complete_version_is_written_by_all_and_committed_by_one() -> None:
    stage = writing()
    orders = sent(stage, m.WriteCheckpoint)
    assert [machine for machine, _ in orders] == ["m0", "m1", "m2", "m3"]
    assert [order.ranks for _, order in orders] == [(0,), (1,), (2,), (3,)]
    assert all(order.bulk_ranks == order.ranks for _, order in orders)
    for name in ("m0", "m1", "m2"):
        answer(stage, name)
    assert sent(stage, m.CommitCheckpoint) == []
    answer(stage, "m3")
    order = commit(stage)
    assert [shard.rank for shard in order.shards] == [0, 1, 2, 3] and order.world_size == 4
    (record,) = stage.recorded(journal.CheckpointKept)
    assert (record.version, record.name) == (at(2), "step-2")
    view = controller.status(stage.state, stage.now)
    assert (view.checkpoint_step, view.checkpoint_name) == (2, "step-2")
    assert view.checkpoint_age_s == 0.0
    assert view.checkpoint_state == ""
    hold(stage, at(2), level=2)
    stage.wait(2)
    assert len(sent(stage, m.WriteCheckpoint)) == 4, "it is there"


def test_a_version_that_is_due_is_not_dropped_for_a_newer_one_of_memory() -> None:
    stage = sharded(settings=(*DURABLE, ("checkpoint.parallel_machines_share", "1.0")))
    settle(stage)
    hold(stage, at(2), level=2)
    hold(stage, at(2), at(3), level=1)  # before the next pulse: it could take the place of step 2
    stage.wait(1)
    assert {order.version for _, order in sent(stage, m.WriteCheckpoint)} == {at(2)}
    assert all(order.oldest <= at(2) for _, order in sent(stage, m.KeepSnapshots))
    save(stage)
    stage.wait(2)
    assert at(3) in [order.oldest for _, order in sent(stage, m.KeepSnapshots)], "it is durable"


def test_a_snapshot_that_no_gate_wanted_durable_is_not_written() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    hold(stage, at(2), level=1)
    stage.wait(2)
    assert sent(stage, m.WriteCheckpoint) == []


def test_without_a_directory_nothing_is_written() -> None:
    stage = sharded()
    settle(stage)
    hold(stage, at(2), level=2)
    stage.wait(2)
    assert sent(stage, m.WriteCheckpoint) == []


def test_a_quarter_of_the_machines_writes_at_once() -> None:
    stage = writing(share="0.25")
    for count in range(1, 5):
        assert len(sent(stage, m.WriteCheckpoint)) == count
        answer(stage, f"m{count - 1}")
    assert len(sent(stage, m.CommitCheckpoint)) == 1


def test_bulk_that_replicas_share_is_written_once() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    for rank in range(4):
        one = m.SnapshotHeld(
            rank=rank, version=at(2), identity=f"part {rank % 2}", kind="own", size_bytes=8
        )
        say(stage, f"m{rank}", one, level=2)
    say(stage, "m4")
    stage.wait(3)
    for name in ("m0", "m1", "m2", "m3"):
        stage.wait(1.5)
        answer(stage, name)
    order_of = dict(sent(stage, m.WriteCheckpoint))
    bulk = sorted(rank for order in order_of.values() for rank in order.bulk_ranks)
    assert bulk == [0, 1]


def test_a_failed_write_is_tried_again_and_then_given_up_while_training_goes_on() -> None:
    stage = writing()
    for count in range(3):
        machine, order = sent(stage, m.WriteCheckpoint)[-1]
        assert order.number == count + 1
        failed = m.CheckpointFailed(
            machine=machine, number=order.number, version=order.version, reason="disk full"
        )
        stage.agent(machine, failed)
    assert stage.phase == "Training" and stage.state.kept.writing is None
    missed = stage.recorded(journal.CheckpointMissed)
    assert len(missed) == 3 and "disk full" in missed[0].reason
    assert "disk full" in controller.status(stage.state, stage.now).checkpoint_state
    hold(stage, at(2), level=2)
    stage.wait(3)
    assert stage.state.kept.writing is None, "enough is enough"
    hold(stage, at(2), at(5), level=2)
    stage.wait(1)
    assert sent(stage, m.WriteCheckpoint)[-1][1].version == at(5), "the next one is due"


def test_a_writer_that_says_nothing_is_given_up_in_time() -> None:
    stage = sharded(settings=(*DURABLE, ("checkpoint.write_timeout_s", "5.0")))
    settle(stage)
    hold(stage, at(2), level=2)
    stage.wait(4)
    assert len(stage.recorded(journal.CheckpointBegun)) == 1
    stage.wait(30)
    assert len(stage.recorded(journal.CheckpointMissed)) == 3
    assert stage.phase == "Training"


def test_a_writer_that_is_lost_ends_the_checkpoint_and_not_the_job() -> None:
    stage = writing()
    stage.kill_machine("m1")
    stage.wait(15)
    assert stage.phase == "Training" and stage.state.generation == 2
    assert stage.recorded(journal.CheckpointMissed)


def test_a_checkpoint_that_a_roll_back_left_behind_does_not_count() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    hold(stage, at(2))
    hold(stage, at(2), at(4), level=2)
    stage.wait(1)
    number = sent(stage, m.WriteCheckpoint)[-1][1].number
    hold(stage, at(2), without=("m4",))
    say(stage, "m4")
    stage.exit(stage.name(1))
    assert stage.state.target == at(2)
    stage.wait(2)
    late = m.CheckpointCommitted(machine="m0", number=number, version=at(4), name="step-4")
    stage.agent("m0", late)
    assert stage.recorded(journal.CheckpointKept) == []


def test_a_restarted_controller_knows_the_newest_checkpoint_and_never_repeats_a_number() -> None:
    stage = writing()
    for name in ("m0", "m1", "m2", "m3"):
        answer(stage, name)
    commit(stage)
    stage.crash()
    assert stage.state.kept.durable is not None and stage.state.kept.durable.version == at(2)
    stage.wait(3)
    hold(stage, at(2), at(6), level=2)
    stage.wait(1)
    assert sent(stage, m.WriteCheckpoint)[-1][1].number == 2


# --------------------------------------------------------------------------- suspend


def stop_at(stage: Stage, step: int) -> None:
    """All ranks pass the gate that carries the stop, take the snapshot and finish."""
    hold(stage, at(step), level=3)
    for member in stage.members():
        stage.actors[member.incarnation].version = at(step)
    stage.finish(is_stopped=True)


def test_a_stop_saves_the_last_state_before_agents_go() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    stage.operator(m.StopRequest(request="q", mode="boundary"))
    bodies = [body for _, body in sent(stage, m.TakeSnapshot | m.StopAtBoundary)]
    assert [type(body) for body in bodies[-8:]] == [m.TakeSnapshot, m.StopAtBoundary] * 4
    stop_at(stage, 3)
    stage.wait(1)
    assert stage.phase == "Completing" and stage.ended is None
    save(stage)
    stage.wait(3)
    assert stage.ended is not None and stage.ended.code == 11


def test_a_stop_whose_state_can_not_be_saved_ends_all_the_same() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    stage.operator(m.StopRequest(request="q", mode="boundary"))
    stage.finish(is_stopped=True)
    stage.wait(20)
    assert stage.ended is not None and stage.ended.code == 9


def finished(stage: Stage, *, level: int) -> None:
    """All ranks have run step 3, the last, and its snapshot is held at `level`."""
    hold(stage, at(3), level=level)
    for member in stage.members():
        stage.actors[member.incarnation].version = at(3)
    stage.finish()


def test_the_end_of_a_job_becomes_a_checkpoint_whatever_the_cadence() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    finished(stage, level=1)
    stage.wait(1)
    assert stage.phase == "Completing" and stage.ended is None
    save(stage)
    stage.wait(3)
    assert stage.ended is not None and stage.ended.code == 0


def test_a_job_whose_end_is_in_no_checkpoint_says_so() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    stage.finish()
    stage.wait(20)
    assert stage.ended is not None and stage.ended.code == 12
    assert "is in no checkpoint (there is none" in stage.ended.reason


def test_an_end_that_can_not_be_saved_is_tried_a_few_times() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    finished(stage, level=3)
    while stage.ended is None:
        writing_now = stage.state.kept.writing
        for name in writing_now.busy if writing_now is not None else ():
            failed = m.CheckpointFailed(
                machine=name, number=writing_now.number, version=at(3), reason="disk full"
            )
            stage.agent(name, failed)
        stage.wait(0.5)
        hold(stage, at(3), level=3)
        assert len(stage.recorded(journal.CheckpointBegun)) <= 3
    assert stage.ended.code == 12 and "disk full" in stage.ended.reason


def test_the_end_does_not_wait_for_a_silent_machine() -> None:
    stage = sharded(settings=(*DURABLE, ("checkpoint.parallel_machines_share", "1.0")))
    settle(stage)
    finished(stage, level=3)
    stage.wait(1)
    stage.dead.add("m1")  # stopped: its link stays
    stage.wait(12)
    assert {o.ranks for n, o in sent(stage, m.WriteCheckpoint) if n == "m1"} == {(1,)}
    save(stage)
    stage.wait(12)
    assert stage.ended is not None and stage.ended.code == 0, "a copy was written by another"


def test_when_every_machine_is_about_to_go_the_job_is_suspended() -> None:
    stage = sharded(settings=DURABLE)
    settle(stage)
    for name in stage.names:
        stage.agent(name, m.AgentLeaving(machine=name, reason="SIGTERM"))
    stage.wait(1)
    assert stage.recorded(journal.StopRequested)
    assert sent(stage, m.TakeSnapshot)[-1][1].level == 3
