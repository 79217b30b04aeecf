"""From the machines' disks to durable storage, and back from whatever is left."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import QUICK, local, make, save

from trainmover.checkpoint.commit import CommitOptions, commit, commit_manifest
from trainmover.checkpoint.copying import Place, copy_files
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.object_store import FsspecStore
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import open_named, pick
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import NothingToRestore, ShardCorrupt, ShardMissing

NOW = Authority(term=1, generation=1)


def save_on_disks(folder: Path, step: int) -> list[Store]:
    """Two machines, a rank each: every disk has its rank's files and the whole manifest."""
    disks: list[Store] = [local(folder / f"m{rank}") for rank in range(2)]
    records = [write_rank(disk, *make(rank, 2, step)) for rank, disk in enumerate(disks)]
    for rank, disk in enumerate(disks):
        options = CommitOptions(present_ranks=frozenset({rank}), created_at=1.0)
        commit(disk, records, NOW, options=options)
    return disks


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_disks_first_then_durable(tmp_path: Path, kind: str) -> None:
    """B4: each machine copies its own files; one commits; all tiers have the same manifest."""
    disks = save_on_disks(tmp_path, 10)
    durable: Store = local(tmp_path / "durable")
    if kind == "objects":
        durable = FsspecStore(f"memory://tier-{uuid.uuid4().hex}", retries=QUICK)
    places = [
        Place(source=disk, target=durable, committed=survey(disk).committed[0]) for disk in disks
    ]
    assert len(copy_files(places[0], ranks={0})) == 2
    with pytest.raises(ShardMissing, match="nothing was committed"):
        commit_manifest(durable, places[0].committed.manifest, NOW)
    assert survey(durable).committed == ()
    assert len(copy_files(places[1], ranks={1})) == 2
    assert copy_files(places[1], ranks={1}) == (), "what is there is not copied again"
    done = commit_manifest(durable, places[0].committed.manifest, NOW)
    assert done.manifest == places[0].committed.manifest
    chosen = pick({"durable": durable})
    assert chosen is not None and chosen.manifest.step == 10


def test_a_corrupt_source_is_not_copied(tmp_path: Path) -> None:
    disks = save_on_disks(tmp_path, 10)
    committed = survey(disks[0]).committed[0]
    file = tmp_path / "m0" / committed.name / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    durable = local(tmp_path / "durable")
    with pytest.raises(ShardCorrupt, match="it is not copied"):
        copy_files(Place(source=disks[0], target=durable, committed=committed), ranks={0})
    assert not list((tmp_path / "durable").rglob("*.safetensors*"))


def test_a_lost_machine(tmp_path: Path) -> None:
    """The newest is on disks only: with a disk gone the durable one before it is taken."""
    durable = local(tmp_path / "durable")
    save(durable, 10)
    disks = save_on_disks(tmp_path, 20)
    both = {"disk of m0": disks[0], "disk of m1": disks[1], "durable": durable}
    chosen = pick(both)
    assert chosen is not None and chosen.manifest.step == 20
    assert chosen.tiers() == ("disk of m0", "disk of m1")
    checkpoint = next(open_named(both, chosen.name))
    for rank in range(2):
        assert checkpoint.read_personal(rank) == make(rank, 2, 20)[0].personal
    left = {"disk of m0": disks[0], "durable": durable}
    chosen = pick(left)
    assert chosen is not None and chosen.manifest.step == 10
    with pytest.raises(NothingToRestore):
        pick({"disk of m0": disks[0]})
