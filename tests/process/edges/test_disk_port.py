"""Machines' own disks, read through their agents' ports: real sockets, one choice for all ranks."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import make

from trainmover import controller
from trainmover.checkpoint.commit import CommitOptions, commit
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.remote_disk import RemoteDisk
from trainmover.checkpoint.tiers import open_disk, open_named
from trainmover.checkpoint.writer import write_rank
from trainmover.daemons.own_disks import OwnDisk
from trainmover.daemons.resume import AUTO, Places, choose_again, choose_start
from trainmover.edges.disk_client import DiskClient
from trainmover.edges.snapshot_client import Holder
from trainmover.edges.snapshot_server import SnapshotServer
from trainmover.edges.snapshot_store import SnapshotStore
from trainmover.errors import (
    DiskLost,
    NothingToRestore,
    StorageDenied,
    StorageFailed,
    TransportError,
)
from trainmover.protocol.messages import DiskPart, Version
from trainmover.topology.keeping import CheckpointConfig, Keeping

SECRET = b"s" * 32
LIMIT_S = 20.0
MACHINES = ("m0", "m1")


def keeping(folder: Path, machine: str) -> Keeping:
    """Every machine has a disk of its own under the same words; only the storage is shared."""
    local = str(folder / machine)
    config = CheckpointConfig(directory=str(folder / "shared"), local_directory=local)
    return Keeping(checkpoint=config)


def save(folder: Path, step: int, owners: tuple[str, str] = MACHINES) -> str:
    """Rank 0 on the first machine's disk, rank 1 on the other's, each committed there."""
    stores = [open_disk(keeping(folder, name).checkpoint, name) for name in owners]
    records = [write_rank(stores[rank], *make(rank, 2, step)) for rank in (0, 1)]
    for rank, store in enumerate(stores):
        options = CommitOptions(present_ranks=frozenset({rank}), created_at=float(rank))
        name = commit(store, records, Authority(term=1, generation=1), options=options).name
    return name


@contextmanager
def agents(folder: Path, *machines: str) -> Iterator[Places]:
    """Data ports of these machines' agents."""
    store = SnapshotStore()
    servers = {
        name: SnapshotServer(
            "127.0.0.1",
            store,
            lambda: SECRET,
            lambda: None,
            LIMIT_S,
            OwnDisk(name, partial(keeping, folder, name)),
        )
        for name in machines
    }
    disks = [
        controller.Disk(machine=name, host="127.0.0.1", port=server.port)
        for name, server in servers.items()
    ]
    try:
        yield Places(disks=tuple(disks), secret=SECRET)
    finally:
        for server in servers.values():
            server.close()
        store.close()


def client(places: Places, machine: str) -> DiskClient:
    (disk,) = (one for one in places.disks if one.machine == machine)
    return DiskClient(Holder(host=disk.host, port=disk.port, secret=SECRET, limit_s=LIMIT_S))


def flip(folder: Path, pattern: str) -> None:
    (path,) = folder.glob(pattern)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_the_union_of_disks_is_a_checkpoint_and_a_rank_reads_what_another_machine_has(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10)
    name = save(tmp_path, 20)
    with agents(tmp_path, *MACHINES) as places:
        found, notes = choose_start(AUTO, keeping(tmp_path, "m0"), places)
        assert found is not None
        assert found.name == name
        assert found.disks == (
            DiskPart(machine="m0", folder="m0", ranks=(0,)),
            DiskPart(machine="m1", folder="m1", ranks=(1,)),
        )
        assert f"files of {name}: 2 from disk of m0, 2 from disk of m1" in notes
        other = client(places, "m1")
        remote = RemoteDisk(other, "m1", "m1", ranks=(1,))
        own = open_disk(keeping(tmp_path, "m0").checkpoint, "m0")
        opened = next(open_named({"own": own, "other": remote}, name))
        for rank in (0, 1):
            state, image = make(rank, 2, 20)
            into = memoryview(bytearray(len(image)))
            opened.read_image(rank, into)
            for entry in state.entries:
                part = slice(entry.offset, entry.offset + entry.size_bytes)
                assert into[part] == image[part], (rank, entry.name)
        assert set(opened.served.values()) == {own.location, "disk of m1"}
        with pytest.raises(StorageDenied):
            remote.put("file", b"x")
        other.close()


def test_what_one_machine_has_lost_leads_to_an_older_one_or_to_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    name = save(tmp_path, 10)
    save(tmp_path, 20)
    flip(tmp_path / "m1", "m1/step-0000000020-*/*.safetensors")
    with agents(tmp_path, *MACHINES) as places:
        found, notes = choose_start(AUTO, keeping(tmp_path, "m0"), places)
        assert found is not None
        assert found.name == name
        assert any("differs from its checksum" in note for note in notes)
        shutil.rmtree(tmp_path / "m1")
        with pytest.raises(NothingToRestore, match=r"rank-00001.* is nowhere whole"):
            choose_start(AUTO, keeping(tmp_path, "m0"), places)


def test_a_machine_that_gives_no_answer_is_named_and_nothing_begins_anew(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with agents(tmp_path, "m0", "m1") as places:
        pass
    silent = controller.Disk(machine="m1", host="", port=0)
    with (
        agents(tmp_path, "m0") as here,
        pytest.raises(NothingToRestore, match="has not said where") as caught,
    ):
        disks = (*here.disks, silent)
        choose_start(AUTO, keeping(tmp_path, "m0"), Places(disks=disks, secret=SECRET))
    assert "rank-00001" in str(caught.value)
    with pytest.raises(NothingToRestore, match="no agent answers"):
        choose_start(AUTO, keeping(tmp_path, "m0"), places)


def test_machines_that_have_changed_their_names_show_what_they_had_before(tmp_path: Path) -> None:
    name = save(tmp_path, 10)
    (tmp_path / "m0").rename(tmp_path / "x")
    (tmp_path / "m1").rename(tmp_path / "m0")
    (tmp_path / "x").rename(tmp_path / "m1")
    with agents(tmp_path, *MACHINES) as places:
        found, _ = choose_start(AUTO, keeping(tmp_path, "m0"), places)
    assert found is not None
    assert found.name == name
    assert found.disks == (
        DiskPart(machine="m0", folder="m1", ranks=(1,)),
        DiskPart(machine="m1", folder="m0", ranks=(0,)),
    )


def test_a_running_job_finds_its_own_and_never_what_it_has_left(tmp_path: Path) -> None:
    old = save(tmp_path, 10)
    name = save(tmp_path, 20)
    config = keeping(tmp_path, "m0")
    with agents(tmp_path, *MACHINES) as places:
        assert choose_again("run-a", config, places, look())[0].name == name
        assert choose_again("run-a", config, places, look(left=((10, 100),)))[0].name == old
        with pytest.raises(NothingToRestore):
            choose_again("another", config, places, look())
        # A run that has begun from the newest one, whose parts are gone: the one before is its own.
        begun = look(history=("run-a",), begun_at=Version(step=20, lineage=1))
        assert choose_again("another", config, places, begun)[0].name == name
        begun = look(history=("run-a",), begun_at=Version(step=10, lineage=1))
        assert choose_again("another", config, places, begun)[0].name == old


def look(**fields: object) -> controller.LookIntoStorage:
    """Of a job that runs."""
    return controller.LookIntoStorage(number=1, is_start=False, disks=(), **fields)  # type: ignore[arg-type]


def test_nothing_but_files_of_checkpoints_is_read(tmp_path: Path) -> None:
    name = save(tmp_path, 10)
    (tmp_path / "m0" / "secret").write_text("x")
    with agents(tmp_path, "m0") as places:
        asked = client(places, "m0")
        for folder, path in (
            ("m0", "../secret"),
            ("..", f"m0/{name}/MANIFEST.json"),
            ("m0", f"{name}/../../secret"),
            ("m0", f"{name}/other"),
        ):
            disk = RemoteDisk(asked, "m0", folder)
            with pytest.raises(StorageFailed):
                disk.read_into(path, 0, memoryview(bytearray(1)))
        asked.close()


def test_a_silent_agent_is_waited_for_once_and_never_by_who_has_given_up() -> None:
    """The kernel accepts for it; its process is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        asked = DiskClient(Holder(host="127.0.0.1", port=port, secret=SECRET, limit_s=0.3))
        disks = [RemoteDisk(asked, "m1", folder) for folder in ("m1", "m7")]
        for disk in (*disks, *disks):
            with pytest.raises(DiskLost):
                disk.list_files("step-8")
        assert all(disk.is_lost for disk in disks)
        silent.settimeout(LIMIT_S)
        silent.accept()[0].close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()

        patient = DiskClient(Holder(host="127.0.0.1", port=port, secret=SECRET, limit_s=600.0))
        lost: list[str] = []

        def look() -> None:
            try:
                patient.look()
            except TransportError as error:
                lost.append(str(error))

        waiting = threading.Thread(target=look, daemon=True)
        waiting.start()
        silent.settimeout(LIMIT_S)
        with silent.accept()[0]:
            patient.close()
            waiting.join(LIMIT_S)
        assert not waiting.is_alive()
        assert lost
