"""The same checkpoints behind fsspec: nothing is renamed, the manifest is the commit."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.unit.checkpoint.sample import QUICK, local, make, save

from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.local_store import LocalStore
from trainmover.checkpoint.object_store import FsspecStore
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.retention import KeepLast
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import open_named, pick
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import ConfigError, ManifestMissing, StorageFailed

RUN = "run-a"


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FsspecStore]:
    if request.param == "file":
        yield FsspecStore(f"file://{tmp_path / 'bucket'}", retries=QUICK)
        return
    url = f"memory://bucket-{uuid.uuid4().hex}"
    yield FsspecStore(url, retries=QUICK)
    system = fsspec.filesystem("memory")
    system.rm(url.removeprefix("memory:/"), recursive=True)


def steps(store: FsspecStore) -> list[int]:
    return [c.manifest.step for c in survey(store).committed]


def test_round_trip(store: FsspecStore) -> None:
    found = save(store, 10)
    assert not open_checkpoint(store, found.name).verify()
    for rank in range(2):
        state, image = make(rank, 2, 10)
        checkpoint = open_checkpoint(store, found.name)
        assert checkpoint.rank_state(rank) == state
        buffer = bytearray(b"\xee" * len(image))
        checkpoint.read_image(rank, memoryview(buffer))
        assert buffer == image


def test_retention_and_leftovers(store: FsspecStore) -> None:
    state, image = make(0, 2, 5)
    write_rank(store, state, image)  # never committed
    for step in (10, 20, 30):
        save(store, step)
    assert steps(store) == [10, 20, 30]
    done = prune(store, KeepLast(2), run_id=RUN)
    assert done.deleted == ("step-0000000010-l1-g1-r0ca441",)
    assert done.leftovers == ("step-0000000005-l1-g1-r0ca441",)
    assert store.list_files("step-0000000005-l1-g1-r0ca441") == {}
    assert steps(store) == [20, 30]


def test_without_a_manifest_it_is_nothing(store: FsspecStore) -> None:
    """The manifest's put is the commit: everything but it is a leftover."""
    save(store, 10)
    twenty = save(store, 20)
    store.delete_file(f"{twenty.name}/MANIFEST.json")
    assert steps(store) == [10]
    with pytest.raises(ManifestMissing):
        open_checkpoint(store, twenty.name)
    chosen = pick({"durable": store})
    assert chosen is None or chosen.manifest.step == 10


def test_a_repeated_save_touches_nothing(store: FsspecStore) -> None:
    """CK-2: committed, then saved again by a controller that doesn't know: not one byte written."""
    found = save(store, 10)
    before = {file: store.read(f"{found.name}/{file}") for file in store.list_files(found.name)}
    assert save(store, 10, term=2).manifest == found.manifest
    assert {f: store.read(f"{found.name}/{f}") for f in store.list_files(found.name)} == before


def test_a_corrupt_object_is_served_by_the_disk(store: FsspecStore, tmp_path: Path) -> None:
    disk = local(tmp_path / "disk")
    save(disk, 10)
    found = save(store, 10)
    path = f"{found.name}/rank-00000.safetensors"
    data = bytearray(store.read(path))
    data[-1] ^= 4
    store.put(path, bytes(data))
    chosen = pick({"durable": store, "disk": disk})
    assert chosen is not None
    assert dict(chosen.sources)["rank-00000.safetensors"] == "disk"
    _, image = make(0, 2, 10)
    buffer = bytearray(b"\xee" * len(image))
    next(open_named({"durable": store, "disk": disk}, chosen.name)).read_image(
        0, memoryview(buffer)
    )
    assert buffer == image


def test_a_flaky_service_is_asked_again(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object stores raise what they like; a bounded number of repetitions, then a name."""
    system: Any = store._system
    real, count = system.pipe_file, 0

    def flaky(path: str, data: bytes, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count % 2:
            raise ConnectionResetError(104, "reset by peer")
        return real(path, data, **more)

    monkeypatch.setattr(system, "pipe_file", flaky)
    assert save(store, 10).manifest.step == 10
    monkeypatch.setattr(system, "pipe_file", lambda *_, **__: 1 / 0)
    with pytest.raises(StorageFailed, match="earlier checkpoints are untouched"):
        save(store, 20)
    monkeypatch.undo()
    assert steps(store) == [10]


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store(tmp_path), LocalStore)
    assert open_store(f"file://{tmp_path}/a%20b").location == f"{tmp_path}/a b"
    assert isinstance(open_store("memory://x"), FsspecStore)
    with pytest.raises(ConfigError, match="can't be opened"):
        open_store("nonsense://x")
    with pytest.raises(ConfigError, match="names no other host"):
        open_store("file://elsewhere/x")
    with pytest.raises(ConfigError, match="empty"):
        open_store("")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"trainmover\[object-storage\]"):
        open_store("s3://bucket/x")
    assert isinstance(open_store(tmp_path), LocalStore), "a plain directory needs no fsspec"
