"""Who would read what at another world size, and when the number alone doesn't tell."""

from __future__ import annotations

from pathlib import Path

from tests.unit.checkpoint.sample import RUN, local, save

from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import Checkpoint, open_checkpoint
from trainmover.checkpoint.restore_plan import plan_restore
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.writer import WriteOptions, write_rank
from trainmover.protocol.snapshot_image import ImageEntry


def columns(path: Path, replicas: int) -> Checkpoint:
    """A tensor cut into two column halves (TP), replicated over a data-parallel dimension."""
    records = []
    world = 2 * replicas
    for rank in range(world):
        entry = ImageEntry(
            name="t",
            kind="parameter",
            dtype="uint8",
            shape=(3, 2),
            offset=0,
            size_bytes=6,
            global_shape=(3, 4),
            global_offset=(0, 2 * (rank % 2)),
            is_sharded=True,
        )
        state = RankState(
            rank=rank,
            world_size=world,
            step=1,
            lineage=1,
            generation=1,
            identity=f"half {rank % 2}",
            entries=(entry,),
            personal=b"",
            shared=b"",
            bulk_digest=rank % 2,
            run_id=RUN,
        )
        options = WriteOptions(writes_bulk=rank < 2)
        records.append(write_rank(local(path), state, memoryview(bytes(6)), options=options))
    found = commit(local(path), records, Authority(term=1, generation=1))
    return open_checkpoint(local(path), found.name)


def test_the_same_world(tmp_path: Path) -> None:
    plan = plan_restore(columns(tmp_path, 2))
    assert (plan.how, plan.is_exact) == ("same", True)
    assert plan.ranks[3].files == ("rank-00003.msgpack", "rank-00001.safetensors")


def test_more_and_fewer_replicas(tmp_path: Path) -> None:
    """Cut along columns: whole replicas may come and go."""
    checkpoint = columns(tmp_path, 2)
    more, fewer = plan_restore(checkpoint, 6), plan_restore(checkpoint, 2)
    assert (more.how, more.is_exact, len(more.ranks)) == ("replicas", False, 6)
    assert more.ranks[5].personal_of is None and more.ranks[3].personal_of == 3
    assert more.ranks[5].files[-1] == "rank-00001.safetensors"
    assert fewer.how == "replicas"


def test_a_number_that_tells_no_layout(tmp_path: Path) -> None:
    plan = plan_restore(columns(tmp_path, 2), 3)
    assert (plan.how, plan.ranks) == ("layout", ())
    assert "does not tell the new layout" in plan.notes[-1]


def test_rows_are_cut_anew(tmp_path: Path) -> None:
    """FSDP2: bytes read are those of the pieces that are touched, bytes held those of the part."""
    found = save(local(tmp_path), 10, world_size=4)
    plan = plan_restore(open_checkpoint(local(tmp_path), found.name), 2)
    assert plan.how == "cut" and len(plan.ranks) == 2
    held = sum(rank.state_bytes for rank in plan.ranks)
    single = plan_restore(open_checkpoint(local(tmp_path), found.name), 1).ranks[0]
    assert single.state_bytes == single.read_bytes
    assert held >= single.state_bytes
