"""The files of one committed checkpoint, on one tier or on several.

Decides that no byte is handed out unchecked (CK-3), and that a file which is missing or corrupt on
one tier is taken from the next one that has it. What a file's bytes mean is `reader`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from trainmover.checkpoint import hashing
from trainmover.checkpoint.bounded import Watch
from trainmover.checkpoint.failures import named
from trainmover.checkpoint.manifest import FileRecord
from trainmover.checkpoint.safetensors_format import (
    LENGTH_BYTES,
    PlacedPiece,
    header_length,
    parse_header,
)
from trainmover.checkpoint.store import Store
from trainmover.errors import CheckpointError, ShardCorrupt, ShardMissing, StorageVanished
from trainmover.units import MIB

T = TypeVar("T")
CHUNK_BYTES = 8 * MIB


class ShardFiles:
    """Checked reading of a checkpoint's files."""

    def __init__(self, stores: Sequence[Store], name: str, watch: Watch | None = None) -> None:
        """`stores` in the order in which they are tried; the first has the manifest."""
        self._stores = tuple(stores)
        self._name = name
        self._headers: dict[tuple[str, str], list[PlacedPiece]] = {}
        self.watch = watch or Watch()
        self.served: dict[str, str] = {}
        """Location that served each file, for reports: which tier gave what."""

    def side(self, file: FileRecord) -> bytes:
        """A side file, whole."""
        return self._from_any(file, lambda store, path: self._whole(store, path, file))

    def pieces(self, file: FileRecord) -> list[PlacedPiece]:
        """What stands in a bulk file."""
        return self._from_any(file, lambda store, path: self._pieces(store, path, file))

    def read_piece(self, file: FileRecord, name: str, into: memoryview) -> None:
        """Fill `into` with the piece called `name`."""
        self._from_any(file, lambda store, path: self._piece(store, path, file, (name, into)))

    def check(self, file: FileRecord) -> None:
        """Compare a whole file with its checksum, on the first store only. Raises CheckpointError.

        Where the file differs, the message names the entries that do.
        """
        store = self._stores[0]
        path = f"{self._name}/{file.path}"
        try:
            self._check(store, path, file)
        except OSError as error:
            raise named(error, "reading", self._shown(store, path)) from error
        except StorageVanished as error:
            raise ShardMissing(f"{self._shown(store, path)} is not there") from error

    def _from_any(self, file: FileRecord, read: Callable[[Store, str], T]) -> T:
        """The result of the first store on which `read` works."""
        path = f"{self._name}/{file.path}"
        problems: list[str] = []
        is_corrupt = False
        for store in self._stores:
            self.watch.at = self._shown(store, path)
            try:
                result = read(store, path)
            except (ShardCorrupt, OSError, CheckpointError) as error:
                is_corrupt = is_corrupt or isinstance(error, ShardCorrupt)
                problems.append(
                    str(error)
                    if isinstance(error, CheckpointError)
                    else str(named(error, "reading", self._shown(store, path)))
                )
                continue
            self.served[file.path] = store.location
            return result
        kind = ShardCorrupt if is_corrupt else ShardMissing
        raise kind("; ".join(problems) + "; no tier has a good copy")

    def _whole(self, store: Store, path: str, file: FileRecord) -> bytes:
        data = bytearray(file.size_bytes)
        self._fill(store, path, 0, memoryview(data))
        if hashing.checksum(data) != file.xxh3:
            raise ShardCorrupt(f"{self._shown(store, path)} differs from its checksum")
        return bytes(data)

    def _pieces(self, store: Store, path: str, file: FileRecord) -> list[PlacedPiece]:
        key = (store.location, file.path)
        if key not in self._headers:
            shown = self._shown(store, path)
            data = bytearray(file.header_bytes)
            self._fill(store, path, 0, memoryview(data))
            if hashing.checksum(data) != file.header_xxh3:
                raise ShardCorrupt(f"{shown}: the header differs from its checksum")
            header_length(bytes(data[:LENGTH_BYTES]), shown)
            self._headers[key] = parse_header(bytes(data[LENGTH_BYTES:]), shown)
        return self._headers[key]

    def _piece(
        self, store: Store, path: str, file: FileRecord, wanted: tuple[str, memoryview]
    ) -> None:
        name, into = wanted
        shown = self._shown(store, path)
        placed = next((p for p in self._pieces(store, path, file) if p.piece.name == name), None)
        if placed is None or placed.piece.size_bytes != len(into):
            raise ShardCorrupt(f"{shown} has no {name} of {len(into)} bytes")
        self._fill(store, path, placed.position, into)
        if _hash(into) != placed.piece.xxh3:
            raise ShardCorrupt(f"{shown}: {name} differs from its checksum")

    def _check(self, store: Store, path: str, file: FileRecord) -> None:
        shown = self._shown(store, path)
        size = store.list_files(self._name).get(file.path)
        if size is None:
            raise ShardMissing(f"{shown} is not there")
        if size != file.size_bytes:
            raise ShardCorrupt(f"{shown} has {size} bytes, expected {file.size_bytes}")
        hasher, buffer = hashing.Hasher(), memoryview(bytearray(min(CHUNK_BYTES, size)))
        opened = store.open(path)
        try:
            for begin in range(0, size, CHUNK_BYTES):
                chunk = buffer[: min(CHUNK_BYTES, size - begin)]
                if opened.read_into(begin, chunk) != len(chunk):
                    raise ShardCorrupt(f"{shown} ends before its {size} bytes")
                hasher.update(chunk)
                self.watch.moved(len(chunk))
        finally:
            opened.close()
        if hasher.hexdigest() != file.xxh3:
            raise ShardCorrupt(f"{shown} differs from its checksum: {self._blame(store, file)}")

    def _blame(self, store: Store, file: FileRecord) -> str:
        """Which entries of a damaged file differ."""
        if not file.header_bytes:
            return "description, personal and shared state"
        path = f"{self._name}/{file.path}"
        try:
            placed = self._pieces(store, path, file)
        except CheckpointError:
            return "the header, so every entry in it"
        damaged = []
        for place in placed:
            data = bytearray(place.piece.size_bytes)
            self._fill(store, path, place.position, memoryview(data))
            if _hash(memoryview(data)) != place.piece.xxh3:
                damaged.append(place.piece.name)
        return ", ".join(damaged) or "bytes outside its entries"

    def _fill(self, store: Store, path: str, position: int, into: memoryview) -> None:
        opened = store.open(path)
        try:
            for begin in range(0, len(into), CHUNK_BYTES):
                chunk = into[begin : begin + CHUNK_BYTES]
                count = opened.read_into(position + begin, chunk)
                self.watch.moved(count)
                if count != len(chunk):
                    raise ShardCorrupt(
                        f"{self._shown(store, path)} ends at {position + begin + count}, "
                        f"bytes up to {position + len(into)} were expected"
                    )
        finally:
            opened.close()

    @staticmethod
    def _shown(store: Store, path: str) -> str:
        return f"{store.location}/{path}"


def _hash(data: memoryview) -> str:
    hasher = hashing.Hasher()
    for begin in range(0, len(data), CHUNK_BYTES):
        hasher.update(data[begin : begin + CHUNK_BYTES])
    return hasher.hexdigest()
