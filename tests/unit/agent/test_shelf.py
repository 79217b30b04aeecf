"""Stories of what a machine keeps: snapshots told, orders carried out once, answers repeated."""

from __future__ import annotations

from tests.unit.agent.test_agent import Host, from_worker, told

from trainmover import agent
from trainmover.protocol import messages as m

V = m.Version(step=50, lineage=1)
OWN = m.SnapshotHeld(rank=0, version=V, identity="a", kind="own", size_bytes=8)
CHANGED = agent.SnapshotsChanged(host="h", port=9, held=(OWN,), level=2)
TAKEN = m.SnapshotTaken(
    incarnation="m0.0.1",
    rank=0,
    version=V,
    generation=1,
    identity="a",
    path="/proc/7/fd/9",
    size_bytes=8,
    bulk_digest=5,
    blocked_s=0.1,
    level=1,
)


def write(number: int) -> m.WriteCheckpoint:
    return m.WriteCheckpoint(
        term=1, number=number, version=V, generation=1, ranks=(0,), bulk_ranks=(0,)
    )


def commit(number: int) -> m.CommitCheckpoint:
    return m.CommitCheckpoint(
        term=1, number=number, version=V, generation=1, world_size=2, shards=()
    )


def done(number: int) -> agent.ShardsDone:
    shard = m.ShardWritten(rank=0, record="{}")
    return agent.ShardsDone(number=number, version=V, shards=(shard,), seconds=0.5)


def test_a_snapshot_is_opened_here_and_not_handed_on() -> None:
    host = Host().with_worker()
    commands = host.feed(from_worker(TAKEN))
    assert commands == [agent.OpenSnapshot(incarnation="m0.0.1", taken=TAKEN)]


def test_a_snapshot_that_failed_is_told_even_later() -> None:
    host = Host().with_worker()
    failed = m.SnapshotFailed(incarnation="m0.0.1", rank=0, version=V, reason="no memory")
    host.feed(agent.LinkDown())
    assert told(host.feed(from_worker(failed))) == []
    host.feed(agent.LinkUp())
    assert failed in [getattr(b, "body", b) for b in told(host.hear(m.Welcome(term=1, spec=SPEC)))]


SPEC = m.JobSpec(job="j", run_id="r", script="t.py", world_size=2, workers_per_machine=1)


def test_what_is_held_is_told_with_the_address_after_each_hello_and_a_few_times() -> None:
    host = Host().welcomed()
    (held,) = told(host.feed(CHANGED))
    assert held == m.SnapshotsHeld(
        machine="m0", incarnation="a1", host="h", port=9, held=(OWN,), level=2
    )
    assert told(host.feed(CHANGED)) == [], "nothing has changed"
    beats = [b for b in told(host.wait(10)) if isinstance(b, m.SnapshotsHeld)]
    assert len(beats) == 3
    # And now and then behind that: what was said before may arrive last.
    seldom = [b for b in told(host.wait(30)) if isinstance(b, m.SnapshotsHeld)]
    assert len(seldom) == 3
    host.feed(agent.LinkDown(), agent.LinkUp())
    assert held in told(host.hear(m.Welcome(term=2, spec=SPEC)))


def test_what_is_held_while_the_link_is_down_is_told_later() -> None:
    host = Host().welcomed()
    host.feed(agent.LinkDown())
    assert told(host.feed(CHANGED)) == []
    host.feed(agent.LinkUp())
    held = [b for b in told(host.hear(m.Welcome(term=1, spec=SPEC))) if hasattr(b, "held")]
    assert len(held) >= 1 and len(set(held)) == 1


def test_backups_of_an_older_generation_or_term_are_not_taken_up() -> None:
    host = Host().welcomed(term=2)
    new = m.PlaceBackups(term=2, generation=5, orders=())
    assert host.hear(new) == [agent.ShipBackups(order=new)]
    assert host.hear(m.PlaceBackups(term=2, generation=4, orders=())) == []
    assert host.hear(m.PlaceBackups(term=1, generation=9, orders=())) == []


def test_what_is_needed_no_more_is_dropped() -> None:
    host = Host().welcomed()
    keep = m.KeepSnapshots(term=1, oldest=V)
    assert host.hear(keep) == [agent.DropSnapshots(keep=keep)]


def test_a_checkpoint_is_written_once_and_answered_each_time() -> None:
    host = Host().welcomed()
    assert host.hear(write(1), write(1)) == [agent.WriteShards(order=write(1))]
    (written,) = told(host.feed(done(1)))
    assert isinstance(written, m.ShardsWritten) and written.machine == "m0"
    assert told(host.hear(write(1))) == [written]
    assert host.hear(commit(1), commit(1)) == [agent.WriteManifest(order=commit(1))]
    (committed,) = told(host.feed(agent.ManifestDone(number=1, version=V, name="step-50")))
    assert isinstance(committed, m.CheckpointCommitted) and committed.name == "step-50"
    assert told(host.hear(commit(1))) == [committed]


def test_a_failed_write_is_told_and_not_tried_again_under_its_number() -> None:
    host = Host().welcomed()
    host.hear(write(1))
    failed = agent.CheckpointWriteFailed(number=1, version=V, reason="disk full")
    (said,) = told(host.feed(failed))
    assert isinstance(said, m.CheckpointFailed) and said.reason == "disk full"
    assert told(host.hear(write(1))) == [said]
    assert host.hear(write(2)) == [agent.WriteShards(order=write(2))]
    assert told(host.feed(done(1))) == [], "an older number is nobody's business"


def test_an_older_number_is_void() -> None:
    host = Host().welcomed()
    host.hear(write(3))
    assert host.hear(write(2), commit(2)) == []


def test_another_agent_may_write_the_manifest() -> None:
    host = Host().welcomed()
    assert host.hear(commit(4)) == [agent.WriteManifest(order=commit(4))]


def test_answers_are_repeated_to_the_next_controller() -> None:
    host = Host().welcomed()
    host.hear(write(1))
    (written,) = told(host.feed(done(1)))
    host.feed(agent.LinkDown(), agent.LinkUp())
    assert written in told(host.hear(m.Welcome(term=2, spec=SPEC)))
