"""Machines' disks and the storage of all, as tiers of a job: what is seen, read first, left out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import QUICK, local, make, save

from trainmover.checkpoint.bounded import Limits
from trainmover.checkpoint.commit import CommitOptions, commit, commit_manifest
from trainmover.checkpoint.copying import Place, copy_files
from trainmover.checkpoint.local_store import LocalInput, LocalStore
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import load
from trainmover.checkpoint.store import Store, open_store
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import DURABLE, open_disk, open_named, open_tiers, pick
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import ConfigError, ManifestMissing, NothingToRestore, StorageHung
from trainmover.topology.keeping import CheckpointConfig

MACHINES = ("m0", "m1")
AUTHORITY = Authority(term=1, generation=1)


def config(folder: Path) -> CheckpointConfig:
    return CheckpointConfig(directory=str(folder / "shared"), local_directory=str(folder / "local"))


def save_on_disks(folder: Path, step: int) -> None:
    """Rank 0 on m0, rank 1 on m1, each committed there."""
    stores = [open_disk(config(folder), machine) for machine in MACHINES]
    records = [write_rank(stores[rank], *make(rank, 2, step)) for rank in (0, 1)]
    for rank, store in enumerate(stores):
        options = CommitOptions(present_ranks=frozenset({rank}), created_at=1.0)
        commit(store, records, AUTHORITY, options=options)


def copy_all(folder: Path, target: Store) -> None:
    """What agents do in the background."""
    for machine, rank in zip(MACHINES, (0, 1), strict=True):
        disk = open_disk(config(folder), machine)
        committed = survey(disk).committed[-1]
        copy_files(Place(source=disk, target=target, committed=committed), ranks={rank})
    commit_manifest(target, committed.manifest, AUTHORITY)


def test_own_disk_first_then_others_then_the_storage(tmp_path: Path) -> None:
    save_on_disks(tmp_path, 10)
    (tmp_path / "local" / "file").touch()
    assert list(open_tiers(config(tmp_path), "m1")) == ["disk of m1", "disk of m0", DURABLE]
    assert list(open_tiers(config(tmp_path))) == ["disk of m0", "disk of m1", DURABLE]
    assert list(open_tiers(config(tmp_path / "elsewhere"), "m1")) == [DURABLE]
    assert list(open_tiers(CheckpointConfig(directory=str(tmp_path)))) == [DURABLE]
    with pytest.raises(ConfigError):
        open_disk(config(tmp_path), "../m1")
    with pytest.raises(ConfigError):
        open_disk(config(tmp_path), "a/b")


@pytest.mark.parametrize("kind", ["directory", "file", "memory"])
def test_newest_over_all_tiers_and_each_file_from_where_it_is_whole(
    kind: str, tmp_path: Path
) -> None:
    """The copy is behind; then a disk is replaced; then a byte flips on the other one."""
    place = str(tmp_path / "shared")
    urls = {"directory": place, "file": f"file://{place}", "memory": f"memory://{tmp_path.name}"}
    shared = open_store(urls[kind], retries=QUICK)
    tiers = {**open_tiers(config(tmp_path)), DURABLE: shared}
    save_on_disks(tmp_path, 10)
    copy_all(tmp_path, shared)
    save_on_disks(tmp_path, 20)
    tiers = {**open_tiers(config(tmp_path)), DURABLE: shared}
    chosen = pick(tiers)
    assert chosen is not None
    assert chosen.manifest.step == 20
    assert chosen.tiers() == ("disk of m0", "disk of m1")
    shutil.rmtree(tmp_path / "local" / "m1")
    chosen = pick(tiers)
    assert chosen is not None
    assert chosen.manifest.step == 10, "of 20 a part has gone"
    assert dict(chosen.sources)["rank-00001.safetensors"] == DURABLE
    assert dict(chosen.sources)["rank-00000.safetensors"] == "disk of m0"
    (shard,) = (tmp_path / "local" / "m0").glob("step-0000000010-*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    chosen = pick(tiers)
    assert chosen is not None
    assert dict(chosen.sources)["rank-00000.safetensors"] == DURABLE
    checkpoint = next(open_named(tiers, chosen.name))
    image = make(0, 2, 10)[1]
    buffer = memoryview(bytearray(len(image)))
    checkpoint.read_image(0, buffer)
    for entry in checkpoint.rank_state(0).entries:
        span = slice(entry.offset, entry.offset + entry.size_bytes)
        assert buffer[span] == image[span]


def test_parts_of_disks_without_the_rest_are_no_fresh_start(tmp_path: Path) -> None:
    """C13: something is there, and none of it whole."""
    save_on_disks(tmp_path, 10)
    shutil.rmtree(tmp_path / "local" / "m1")
    with pytest.raises(NothingToRestore, match="rank-00001"):
        pick(open_tiers(config(tmp_path)))


class DeadStore(LocalStore):
    """Gives no answer when it is listed or read, played by a FIFO that nobody writes to."""

    is_listed = True

    def list_folders(self) -> list[str]:
        if self.is_listed:
            self._wait()
        return super().list_folders()

    def open(self, path: str) -> LocalInput:
        if not self.is_listed and path.endswith(".safetensors"):
            self._wait()
        return super().open(path)

    def _wait(self) -> None:
        with open(self.root.parent / "fifo", "rb") as fifo:
            fifo.read(1)


@pytest.mark.parametrize("is_listed", [True, False], ids=["listing", "reading"])
def test_a_storage_that_hangs_is_left_out_where_disks_have_everything(
    is_listed: bool, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    save(local(tmp_path / "shared"), 5, world_size=2)
    dead = DeadStore(tmp_path / "shared", retries=QUICK)
    dead.is_listed = is_listed
    save_on_disks(tmp_path, 10)
    copy_all(tmp_path, local(tmp_path / "shared"))
    disks = {name: s for name, s in open_tiers(config(tmp_path)).items() if name != DURABLE}
    limits = Limits(stall_s=1.0, total_s=20.0)

    def choose_from(tiers: dict[str, Store]) -> int | None:
        found = load(lambda w: pick(tiers, watch=w, limits=limits), what="it", limits=limits)
        return found.manifest.step if found is not None else None

    try:
        assert choose_from({DURABLE: dead, **disks}) == 10
        with pytest.raises(StorageHung, match="loading it"):
            choose_from({DURABLE: dead})
    finally:
        writer = os.open(tmp_path / "fifo", os.O_RDWR)
        os.write(writer, b"xxxx")
        os.close(writer)


def test_a_version_that_two_tries_wrote_differently_is_readable_from_either(
    tmp_path: Path,
) -> None:
    """A disk was full: the storage got the version straight from memory, by other writers."""
    save_on_disks(tmp_path, 10)
    shared = local(tmp_path / "shared")
    records = [write_rank(shared, *make(rank, 2, 10, tensors=())) for rank in (0, 1)]
    (name,) = {
        commit(shared, records, AUTHORITY).name,
        survey(open_disk(config(tmp_path), "m0")).committed[0].name,
    }
    found = list(open_named(open_tiers(config(tmp_path), "m0"), name))
    assert len(found) == 2
    with pytest.raises(ManifestMissing):
        next(open_named(open_tiers(config(tmp_path)), "step-0000000099-l1-g1-r000000"))


def test_settings_that_make_no_two_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="first tier of two"):
        CheckpointConfig(local_directory="/local")
    with pytest.raises(ConfigError, match="choose two"):
        CheckpointConfig(directory="/same", local_directory="/same")
    with pytest.raises(ConfigError, match="directory of each machine"):
        CheckpointConfig(directory="/shared", local_directory="s3://bucket/x")
