"""Reads a committed checkpoint: a rank as it was saved, or any part of any tensor.

Decides how saved pieces become what is asked for. Never unpickles: descriptions are msgpack of
known structs, personal and shared state are handed on as bytes. Never casts: a dtype is what it was
when it was saved (C67).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from trainmover.checkpoint.bounded import LOAD_LIMITS, Limits, Watch, bounded
from trainmover.checkpoint.manifest import FileRecord, LayoutEntry
from trainmover.checkpoint.safetensors_format import Piece, element_bytes
from trainmover.checkpoint.shard_files import ShardFiles
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.slices import Box, check_inside, copy_shared
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed, read_manifest
from trainmover.errors import CheckpointError, LayoutMismatch, ShardCorrupt
from trainmover.protocol.snapshot_image import ImageEntry

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """What is wrong with one file."""

    path: str
    reason: str


class Checkpoint:
    """An open checkpoint. Nothing but the manifest has been read yet."""

    def __init__(
        self, stores: Sequence[Store], committed: Committed, watch: Watch | None = None
    ) -> None:
        self.name = committed.name
        self.manifest = committed.manifest
        self._files = ShardFiles(stores, committed.name, watch)
        self._states: dict[int, RankState] = {}
        self._where: dict[str, list[tuple[FileRecord, Piece]]] | None = None

    @property
    def served(self) -> dict[str, str]:
        """Which store served each file so far."""
        return dict(self._files.served)

    def rank_state(self, rank: int) -> RankState:
        """Description, personal and shared state of `rank`. Raises CheckpointError."""
        if rank not in self._states:
            file = self.manifest.files_of(rank)[0]
            try:
                state = msgspec.msgpack.decode(self._files.side(file), type=RankState)
            except msgspec.MsgspecError as error:
                raise ShardCorrupt(f"{file.path} describes no rank: {error}") from error
            if (state.rank, state.step) != (rank, self.manifest.step):
                raise ShardCorrupt(
                    f"{file.path} describes rank {state.rank} at step {state.step}, expected rank "
                    f"{rank} at {self.manifest.step}: files were swapped"
                )
            self._states[rank] = state
        return self._states[rank]

    def read_personal(self, rank: int) -> bytes:
        """Personal state of `rank`, as it was handed over. Raises CheckpointError."""
        return self.rank_state(rank).personal

    def read_shared(self, rank: int = 0) -> bytes:
        """Shared small state; equal on all ranks. Raises CheckpointError."""
        return self.rank_state(rank).shared

    def entry(self, rank: int, name: str) -> ImageEntry:
        """Description of one entry of a rank. Raises LayoutMismatch."""
        found = next((e for e in self.rank_state(rank).entries if e.name == name), None)
        if found is None:
            raise LayoutMismatch(f"rank {rank} of {self.name} has no entry {name}")
        return found

    def read_entry(self, rank: int, name: str, into: memoryview) -> None:
        """Fill `into` with one entry of a rank, checked.

        Args:
            rank: As in the checkpoint.
            name: Of the entry.
            into: [bytes] uint8, exactly the entry's size.
        Raises:
            LayoutMismatch: No such entry, or another size.
            ShardCorrupt: No tier has bytes that agree with the checksum.
        """
        entry = self.entry(rank, name)
        if into.nbytes != entry.size_bytes:
            raise LayoutMismatch(
                f"{name} of rank {rank} has {entry.size_bytes} bytes, the buffer {into.nbytes}"
            )
        self._read(rank, {name: into})

    def read_image(self, rank: int, into: memoryview) -> None:
        """Fill `into` with the whole bulk state of a rank, laid out as it was saved.

        Gaps between entries are left as they are. Raises as `read_entry`.
        """
        entries = self.rank_state(rank).entries
        end = max((entry.offset + entry.size_bytes for entry in entries), default=0)
        if into.nbytes < end:
            raise LayoutMismatch(f"rank {rank} needs {end} bytes, the buffer has {into.nbytes}")
        self._read(rank, {e.name: into[e.offset : e.offset + e.size_bytes] for e in entries})

    def _read(self, rank: int, wanted: dict[str, memoryview]) -> None:
        """Fill each buffer from the files of the rank that holds the bulk state of `rank`."""
        left = {name: len(into) for name, into in wanted.items()}
        seen: set[str] = set()
        for file in self.manifest.files_of(rank)[1:]:
            for placed in self._files.pieces(file):
                piece = placed.piece
                if piece.name not in wanted:
                    continue
                into = wanted[piece.name][piece.begin : piece.begin + piece.size_bytes]
                self._files.read_piece(file, piece.name, into)
                left[piece.name] -= piece.size_bytes
                seen.add(piece.name)
        absent = sorted(name for name in wanted if left[name] or name not in seen)
        if absent:
            raise ShardCorrupt(f"{self.name}: the files of rank {rank} don't hold {absent[0]}")

    def layout(self, name: str) -> LayoutEntry:
        """What is known of a tensor of the job. Raises LayoutMismatch."""
        found = next((e for e in self.manifest.layout if e.name == name), None)
        if found is None:
            raise LayoutMismatch(f"{self.name} has no tensor {name}")
        return found

    def assemble(self, name: str, global_offset: Sequence[int], shape: Sequence[int]) -> bytearray:
        """Any part of a tensor, from whichever files hold it, checked.

        For another world size or layout: each new rank asks for its own part. Where ranks hold
        different tensors of one name that are not sharded, the lowest rank's is given.

        Returns:
            Elements in row-major order, in the saved dtype.
        Raises:
            LayoutMismatch: No such tensor, or the part lies outside it.
            ShardCorrupt: No tier has bytes that agree with the checksum, or parts are missing.
        """
        whole = self.layout(name)
        target = Box(tuple(global_offset), tuple(shape))
        check_inside(target, whole.global_shape, name)
        size = element_bytes(whole.dtype, name)
        into = bytearray(target.element_count * size)
        filled = sum(
            self._contribute(file, piece, target, memoryview(into))
            for file, piece in self._pieces_of(name)
        )
        if filled != target.element_count:
            raise ShardCorrupt(
                f"{name}: {filled} of {target.element_count} elements of {tuple(shape)} at "
                f"{tuple(global_offset)} are saved"
            )
        return into

    def _contribute(self, file: FileRecord, piece: Piece, target: Box, into: memoryview) -> int:
        source = Box(piece.global_offset, piece.shape)
        size = element_bytes(piece.dtype, piece.name)
        if source == target:
            self._files.read_piece(file, piece.name, into)
            return target.element_count
        if source.shared(target) is None:
            return 0
        data = memoryview(bytearray(piece.size_bytes))
        self._files.read_piece(file, piece.name, data)
        return copy_shared(source, data, target, into, size)

    def pieces_of(self, name: str) -> list[Piece]:
        """Saved pieces of a tensor, each part of it once. Raises CheckpointError."""
        return [piece for _, piece in self._pieces_of(name)]

    def files_for(self, name: str) -> list[tuple[FileRecord, Piece]]:
        """Which file holds which piece of a tensor. Raises CheckpointError."""
        return list(self._pieces_of(name))

    def _pieces_of(self, name: str) -> Iterator[tuple[FileRecord, Piece]]:
        taken: set[tuple[int, ...]] = set()
        for file, piece in self._index().get(name, []):
            if piece.global_offset in taken or 0 in piece.shape:
                continue  # a replica of this part under another identity, or nothing at all
            taken.add(piece.global_offset)
            yield file, piece

    def _index(self) -> dict[str, list[tuple[FileRecord, Piece]]]:
        """Every piece by name, from the headers of all files."""
        if self._where is None:
            where: dict[str, list[tuple[FileRecord, Piece]]] = {}
            for file in sorted(self.manifest.files, key=lambda f: (f.rank, f.path)):
                for placed in self._files.pieces(file) if file.header_bytes else ():
                    where.setdefault(placed.piece.name, []).append((file, placed.piece))
            self._where = where
        return self._where

    def verify(
        self,
        progress: Callable[[FileRecord], None] | None = None,
        only: Collection[str] | None = None,
    ) -> list[Damage]:
        """Compare files on the first store with their checksums; what differs, by entry.

        Args:
            progress: Called after each file.
            only: Paths to look at; None: all.
        """
        damaged = []
        for file in self.manifest.files:
            if only is not None and file.path not in only:
                continue
            try:
                self._files.check(file)
            except CheckpointError as error:
                damaged.append(Damage(path=file.path, reason=str(error)))
            if progress is not None:
                progress(file)
        return damaged

    def conflicts(self) -> list[str]:
        """Tensors of which ranks hold different bytes at one place; `assemble` gives the lowest's.

        Raises CheckpointError.
        """
        found = []
        for name, placed in self._index().items():
            sums: dict[tuple[object, ...], str] = {}
            for _, piece in placed:
                place = (piece.global_offset, piece.shape)
                if sums.setdefault(place, piece.xxh3) != piece.xxh3:
                    found.append(name)
                    break
        return sorted(found)


def open_checkpoint(
    store: Store, name: str, *, others: Sequence[Store] = (), watch: Watch | None = None
) -> Checkpoint:
    """A committed checkpoint, its manifest checked.

    Args:
        store: Has the manifest, and is tried first for every file.
        name: Directory below the store's root.
        others: Tiers that may hold copies under the same name, tried in this order for a file that
            is missing or corrupt.
        watch: Told of progress, and ends the reading where it has been abandoned.
    Raises:
        ManifestMissing: Nothing was committed under that name.
        ManifestCorrupt: The manifest contradicts its checksum; it is never patched together.
    """
    manifest = read_manifest(store, name)
    return Checkpoint((store, *others), Committed(name=name, manifest=manifest), watch)


def load(
    work: Callable[[Watch], T],
    *,
    what: str,
    limits: Limits = LOAD_LIMITS,
    watch: Watch | None = None,
) -> T:
    """The result of reading work, within the load limit (10 min). Raises StorageHung."""
    return bounded(work, limits, doing=f"loading {what}", watch=watch)
