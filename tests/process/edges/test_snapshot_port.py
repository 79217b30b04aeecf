"""An agent's memory of snapshots, and the port through which others reach it: real sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from tests.process.edges.images import Memory, new_memory, write
from tests.waiting import eventually

from trainmover import agent
from trainmover.checkpoint.manifest import ShardRecord
from trainmover.daemons.durable import DurableWriter
from trainmover.daemons.own_disks import OwnDisk
from trainmover.daemons.snapshot_plane import SnapshotPlane, Surroundings
from trainmover.edges.seal import NONCE_BYTES
from trainmover.edges.snapshot_client import Holder, fetching, give
from trainmover.edges.snapshot_server import SnapshotServer
from trainmover.edges.snapshot_store import Kept, SnapshotStore
from trainmover.edges.snapshot_wire import MAGIC
from trainmover.errors import AuthenticationFailed, StateMismatch, TransportError
from trainmover.protocol.messages import (
    BackupOrder,
    BackupPlace,
    KeepSnapshots,
    PlaceBackups,
    SnapshotTaken,
    Version,
    WriteCheckpoint,
)
from trainmover.protocol.snapshot_image import FREE, OLDEST, WAITING, WRITING, ImageEntry
from trainmover.topology.keeping import CheckpointConfig, Keeping

SECRET = b"s" * 32
LIMIT_S = 20.0


@dataclass
class Machine:
    """Memory and port of one agent."""

    store: SnapshotStore = field(default_factory=SnapshotStore)
    stored: int = 0

    def __post_init__(self) -> None:
        self.server = SnapshotServer(
            "127.0.0.1",
            self.store,
            lambda: SECRET,
            self._count,
            LIMIT_S,
            OwnDisk("m0", Keeping),
        )

    def _count(self) -> None:
        self.stored += 1

    def holder(self, secret: bytes = SECRET) -> Holder:
        return Holder(host="127.0.0.1", port=self.server.port, secret=secret, limit_s=LIMIT_S)

    def close(self) -> None:
        self.server.close()
        self.store.close()


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    made = [Machine() for _ in range(count)]
    try:
        yield made
    finally:
        for machine in made:
            machine.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = new_memory()
    yield made
    made.close()


def keep(store: SnapshotStore, taken: SnapshotTaken) -> Kept:
    kept = store.open_own(taken)
    assert store.check(kept)
    return kept


def fetch(holder: Holder, rank: int, version: Version) -> bytes:
    got = b""

    def take(entry: ImageEntry) -> bytes:
        data = bytearray(entry.size_bytes)
        it.read(entry, memoryview(data))
        return bytes(data)

    with fetching(holder, rank, version) as it:
        for entry in it.description.entries:
            got += take(entry)
        it.end()
    return got


def test_a_snapshot_goes_to_a_peer_and_from_there_to_whoever_needs_it(memory: Memory) -> None:
    content = os.urandom(300_001)
    with machines(2) as (owner, peer):
        kept = keep(owner.store, write(memory, 1, 50, content))
        with owner.store.reading(1, kept.version) as held:
            assert give(peer.holder(), held)
            assert not give(peer.holder(), held), "it has it already"
        eventually(lambda: peer.stored == 1, "the peer has told it once")
        (told,) = peer.store.told()
        assert (told.kind, told.rank, told.version) == ("peer", 1, kept.version)
        assert told.bulk_digest == kept.bulk_digest
        # The owner's machine is lost: its memory goes, the copy stays.
        memory.image.begin()
        assert fetch(peer.holder(), 1, kept.version) == content


def test_a_stranger_gets_nothing(memory: Memory) -> None:
    with machines(1) as (owner,):
        kept = keep(owner.store, write(memory, 0, 50, b"x" * 99))
        with pytest.raises((AuthenticationFailed, TransportError)):
            fetch(owner.holder(b"another" * 5), 0, kept.version)
        with socket.create_connection(("127.0.0.1", owner.server.port)) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            stream.settimeout(LIMIT_S)
            assert len(read_to_end(stream)) <= len(MAGIC) + NONCE_BYTES
        assert fetch(owner.holder(), 0, kept.version) == b"x" * 99


def test_what_is_not_held_is_refused_by_name(memory: Memory) -> None:
    with machines(1) as (owner,):
        keep(owner.store, write(memory, 0, 50, b"x" * 99))
        with pytest.raises(TransportError, match="no whole snapshot of rank 1"):
            fetch(owner.holder(), 1, Version(step=50, lineage=1))


def test_a_snapshot_overwritten_while_it_is_read_is_not_taken_for_whole() -> None:
    size = 64 << 20  # more than sockets buffer
    memory = new_memory(size + (1 << 20))
    with machines(1) as (owner,):
        kept = keep(owner.store, write(memory, 0, 50, bytes(size)))
        with fetching(owner.holder(), 0, kept.version) as it:
            memory.image.begin()
            first, second = it.description.entries
            it.read(first, memoryview(bytearray(first.size_bytes)))
            it.read(second, memoryview(bytearray(second.size_bytes)))
            with pytest.raises(StateMismatch, match="overwritten while it was read"):
                it.end()
        assert owner.store.told() == ()
    memory.close()


def test_an_announced_image_that_is_another_one_is_not_kept(memory: Memory) -> None:
    store = SnapshotStore()
    old = write(memory, 0, 50, b"x" * 99)
    write(memory, 0, 60, b"y" * 99)
    with pytest.raises(StateMismatch, match="was announced"):
        store.open_own(old)
    assert store.told() == ()


def test_a_worker_may_write_again_only_where_a_newer_version_is_complete() -> None:
    store, slots = SnapshotStore(), [new_memory(), new_memory()]
    keep(store, write(slots[0], 0, 50, b"a" * 99))
    keep(store, write(slots[1], 0, 60, b"b" * 99))
    assert [slot.image.hold for slot in slots] == [OLDEST, WAITING]
    with store.reading(0, Version(step=50, lineage=1), is_for_storage=True):
        assert slots[0].image.hold == WRITING
        store.drop(Version(step=60, lineage=1), ())
        assert slots[0].image.hold == WRITING, "it is being written"
    assert [slot.image.hold for slot in slots] == [FREE, OLDEST]
    assert [held.version.step for held in store.told()] == [60]
    for slot in slots:
        slot.close()


def test_versions_of_a_rolled_back_time_line_are_dropped() -> None:
    store, slots = SnapshotStore(), [new_memory(), new_memory()]
    keep(store, write(slots[0], 0, 50, b"a" * 99))
    keep(store, write(slots[1], 0, 60, b"b" * 99))
    store.drop(Version(step=50, lineage=1), (Version(step=60, lineage=1),))
    assert [held.version.step for held in store.told()] == [50]
    assert [slot.image.hold for slot in slots] == [OLDEST, FREE]
    for slot in slots:
        slot.close()


def test_memory_stays_bounded_over_200_saves() -> None:
    content, slots = os.urandom(200_000), [new_memory(), new_memory()]
    with machines(2) as (owner, peer):
        held_before = 0
        for number in range(200):
            taken = write(slots[number % 2], 0, 10 + number, content)
            kept = keep(owner.store, taken)
            with owner.store.reading(0, kept.version) as one:
                assert give(peer.holder(), one)
            for machine in (owner, peer):
                machine.store.drop(kept.version, ())
            assert len(owner.store.told()) == len(peer.store.told()) == 1
            if number == 20:
                held_before = memory_files()
        # A mapping goes with its last view, which a thread may hold a moment longer.
        eventually(lambda: memory_files() <= held_before + 2, "as many mappings as after 20 saves")
    eventually(lambda: not memory_files("trainmover-backup"), "the copies' memory is gone")
    for slot in slots:
        slot.close()


def read_to_end(stream: socket.socket) -> bytes:
    """Until the other end closes, in whatever way."""
    data = b""
    try:
        while part := stream.recv(4096):
            data += part
    except ConnectionResetError:
        return data
    return data


def memory_files(name: str = "") -> int:
    """Mapped memory files of this process."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return sum(1 for line in lines if "memfd:" in line and name in line)


@contextmanager
def planes() -> Iterator[SnapshotPlane]:
    """An agent's hands for snapshots."""
    around = Surroundings(
        machine="m0",
        host="127.0.0.1",
        secret=lambda: SECRET,
        keeping=Keeping,
        post=lambda _: None,
    )
    plane = SnapshotPlane(around)
    plane.start()
    yield plane
    plane.close()


def ship(plane: SnapshotPlane, *places: BackupPlace) -> None:
    orders = (BackupOrder(rank=1, places=places),)
    plane.act(agent.ShipBackups(order=PlaceBackups(term=1, generation=1, orders=orders)))


@pytest.mark.timeout(60)
def test_a_copy_for_a_silent_peer_ends_with_its_version_and_with_its_place(memory: Memory) -> None:
    """Until then it keeps the memory of its version from the worker, and later copies waiting."""
    other = new_memory()
    with socket.create_server(("127.0.0.1", 0)) as silent, planes() as plane:
        silent.settimeout(LIMIT_S)
        ship(plane, BackupPlace(machine="m1", host="127.0.0.1", port=silent.getsockname()[1]))
        first = write(memory, 1, 50, b"x" * 4096)
        plane.act(agent.OpenSnapshot(incarnation="w1", taken=first))
        with silent.accept()[0]:  # and not a word more
            newer = write(other, 1, 100, b"y" * 4096)
            plane.act(agent.OpenSnapshot(incarnation="w1", taken=newer))
            plane.act(agent.DropSnapshots(keep=KeepSnapshots(term=1, oldest=newer.version)))
            eventually(lambda: memory.image.hold == FREE, "its memory is free", timeout_s=LIMIT_S)
        second = silent.accept()[0]
        ship(plane)
        second.settimeout(LIMIT_S)
        assert len(read_to_end(second)) < 4096, "ended, not waited for"
        second.close()
    other.close()


def test_a_snapshot_that_was_just_taken_again_is_written_with_its_digest(
    memory: Memory, tmp_path: Path
) -> None:
    """The job's last state may be: what its ranks write must be known to be alike."""
    keeping = Keeping(checkpoint=CheckpointConfig(directory=str(tmp_path)))
    posted: list[agent.Event] = []
    with machines(1) as (owner,):
        kept = owner.store.open_own(write(memory, 0, 50, os.urandom(100_000)))
        assert kept.bulk_digest == 0, "it is taken in the background"
        writer = DurableWriter("m0", owner.store, lambda: keeping, posted.append)
        writer.write(
            WriteCheckpoint(
                term=1, number=1, version=kept.version, generation=1, ranks=(0,), bulk_ranks=(0,)
            )
        )
        assert owner.store.check(kept)
        digest = kept.bulk_digest
    (done,) = posted
    assert isinstance(done, agent.ShardsDone), done
    record = msgspec.json.decode(done.shards[0].record, type=ShardRecord)
    assert record.bulk_digest == digest != 0
