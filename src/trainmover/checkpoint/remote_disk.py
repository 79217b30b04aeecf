"""Another machine's own disk as a store to read from: its agent hands the bytes out.

Decides which questions travel: a manifest that several machines have is fetched from one of them,
checksums are compared where the files lie, and a file of a rank that was not promised is not asked
for. Nothing can be written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

from trainmover.checkpoint import names
from trainmover.checkpoint.bounded import Watch
from trainmover.checkpoint.failures import Retries
from trainmover.checkpoint.reader import Damage
from trainmover.checkpoint.store import Output, Space
from trainmover.edges.disk_client import DiskClient
from trainmover.edges.snapshot_wire import CheckpointOnDisk
from trainmover.errors import (
    DiskLost,
    RemoteProtocolError,
    StorageDenied,
    StorageFailed,
    StorageVanished,
    TransportError,
)

Manifests = MutableMapping[tuple[str, str], bytes]
"""Bytes of manifests that were read, by checkpoint and fingerprint."""
NOT_SAID: Final = "its agent has not said where its disk is read"


class RemoteInput:
    """A file there."""

    def __init__(self, disk: RemoteDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    def read_into(self, position: int, into: memoryview) -> int:
        """As `Input.read_into`."""
        return self._disk.read_into(self._path, position, into)

    def close(self) -> None:
        """Nothing is held open there."""


class RemoteDisk:
    """One directory of a machine's local tier."""

    def __init__(
        self,
        client: DiskClient | None,
        machine: str,
        folder: str,
        *,
        ranks: Collection[int] | None = None,
        manifests: Manifests | None = None,
    ) -> None:
        """
        Args:
            client: Of the machine's agent; None: nobody knows where it is, nothing can be read.
            machine: Its name.
            folder: Directory of the tier.
            ranks: Whose files are there, as far as anybody counts on them; None: not known.
            manifests: Shared with other disks.
        """
        self.retries = Retries()
        self.machine = machine
        self.folder = folder
        self.is_lost = False
        """Whether its agent has once given no answer."""
        self._client = client
        self._ranks = None if ranks is None else frozenset(ranks)
        self._manifests: Manifests = {} if manifests is None else manifests
        self._seen: dict[str, CheckpointOnDisk] | None = None
        self._is_listed = False

    @property
    def location(self) -> str:
        """For people."""
        of = "" if self.folder == self.machine else f" ({self.folder}'s)"
        return f"disk of {self.machine}{of}"

    def knows(self, found: Sequence[CheckpointOnDisk]) -> None:
        """What a look at the whole disk has just found; the first listing is that."""
        self._seen = {one.name: one for one in found if one.folder == self.folder}
        self._is_listed = False

    # ------------------------------------------------------------------ reading

    def exists(self) -> bool:
        """It is asked when it is read."""
        return True

    def list_folders(self) -> list[str]:
        """As `Store.list_folders`; asks again whenever it is asked again."""
        if self._seen is None or self._is_listed:
            self._look()
        self._is_listed = True
        return sorted(self._seen or {})

    def list_files(self, folder: str) -> dict[str, int]:
        """As `Store.list_files`, as of the last look."""
        if self._seen is None:
            self._look()
        one = (self._seen or {}).get(folder)
        return {} if one is None else dict(one.files)

    def _look(self) -> None:
        with self._naming("looking at"):
            self.knows(self._asked().look())

    def open(self, path: str) -> RemoteInput:
        """As `Store.open`; says at once that a file of another rank is not there."""
        rank = names.rank_of(path.rpartition("/")[2])
        if rank is not None and self._ranks is not None and rank not in self._ranks:
            raise StorageVanished(f"{self.location} was not said to have {path}")
        return RemoteInput(self, path)

    def read_into(self, path: str, position: int, into: memoryview) -> int:
        """Bytes of a file. Raises StorageFailed."""
        with self._naming(f"reading {path} on"):
            return self._asked().read(self.folder, path, position, into)

    def read(self, path: str) -> bytes:
        """As `Store.read`."""
        name, _, file = path.rpartition("/")
        one = (self._seen or {}).get(name)
        if file != names.MANIFEST or one is None or not one.fingerprint:
            return self._read(path)
        key = (name, one.fingerprint)
        if key not in self._manifests:
            self._manifests[key] = self._read(path)
        return self._manifests[key]

    def _read(self, path: str) -> bytes:
        name, _, file = path.rpartition("/")
        data = bytearray(self.list_files(name).get(file, 0))
        count = self.read_into(path, 0, memoryview(data))
        return bytes(data[:count])

    def check(self, name: str, paths: Collection[str], watch: Watch) -> list[Damage]:
        """Compare files with their checksums, over there. Raises StorageFailed."""
        with self._naming(f"checking {name} on"):
            damages = self._asked().check(self.folder, name, tuple(sorted(paths)), watch.moved)
        return [Damage(path=path, reason=reason) for path, reason in damages]

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()

    def _asked(self) -> DiskClient:
        if self._client is None:
            raise StorageFailed(f"{self.location}: {NOT_SAID}")
        return self._client

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            self.is_lost = True
            raise DiskLost(f"{doing} the {self.location}: {error}") from error
        except RemoteProtocolError as error:
            raise StorageFailed(f"{doing} the {self.location}: {error}") from error

    # ------------------------------------------------------------------ nothing is written

    def _refuse(self) -> NoReturn:
        raise StorageDenied(f"the {self.location} belongs to another machine: it is only read")

    def staging(self, name: str) -> str:
        """As `Store.staging`; refused."""
        self._refuse()

    def make_root(self) -> None:
        """Refused."""
        self._refuse()

    def make_folder(self, folder: str) -> None:
        """Refused."""
        self._refuse()

    def create(self, path: str) -> Output:
        """Refused."""
        self._refuse()

    def put(self, path: str, data: bytes) -> None:
        """Refused."""
        self._refuse()

    def publish(self, folder: str, name: str) -> str:
        """Refused."""
        self._refuse()

    def retire(self, name: str) -> str:
        """Refused."""
        self._refuse()

    def delete_file(self, path: str, *, is_durable: bool = False) -> None:
        """Refused."""
        self._refuse()

    def delete_folder(self, folder: str) -> bool:
        """Refused."""
        self._refuse()

    def free(self) -> Space | None:
        """Nobody says."""
        return None
