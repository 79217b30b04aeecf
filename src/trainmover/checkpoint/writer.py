"""Writes one rank's shard: side file and, where this rank is the one to, its bulk state.

Decides how the image is cut into files and in which order bytes are checked and written. The image
is read where it is: once for the checksums, once for the file; no second copy is made. What exists
afterwards lies in the checkpoint's staging directory and counts for nothing before `commit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from trainmover.checkpoint import hashing, names
from trainmover.checkpoint.bounded import Limits, Watch, bounded
from trainmover.checkpoint.failures import retrying
from trainmover.checkpoint.manifest import FileRecord, LayoutEntry, ShardRecord, grid_of
from trainmover.checkpoint.marker import mark
from trainmover.checkpoint.safetensors_format import (
    METADATA,
    Piece,
    element_bytes,
    in_file_order,
    make_header,
)
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import read_manifest
from trainmover.errors import (
    CheckpointError,
    ConfigError,
    LayoutMismatch,
    ManifestCorrupt,
    StorageFull,
)
from trainmover.protocol.snapshot_image import ImageEntry
from trainmover.units import MIB

DEFAULT_SPLIT_BYTES: Final = 5_000_000_000
MARGIN_BYTES: Final = 4 * MIB
"""Asked for beyond the state itself: headers, manifest, directories."""
MARGIN_FILES: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """How a shard is written."""

    writes_bulk: bool = True
    """False for a replica whose bulk state another rank writes."""
    split_bytes: int = DEFAULT_SPLIT_BYTES
    """Largest file; a single row of a tensor is never cut."""
    chunk_bytes: int = 8 * MIB
    """Bytes per write call; progress is noted in between."""
    limits: Limits = field(default_factory=Limits)
    watch: Watch | None = None
    """To follow the progress from outside, and to know when an abandoned call lets the image go.
    One for each call."""

    def __post_init__(self) -> None:
        if self.split_bytes < 1 or self.chunk_bytes < 1:
            raise ConfigError("split_bytes and chunk_bytes must be at least 1")


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of one entry that go into one file; begin and size count the entry's bytes."""

    entry: ImageEntry
    first_row: int
    row_count: int
    begin: int
    size_bytes: int


def write_rank(
    store: Store, state: RankState, image: memoryview, *, options: WriteOptions | None = None
) -> ShardRecord:
    """Write a rank's shard durably into the staging directory, and say what was written.

    Called on: the machine that holds the image; for all ranks in any order and at the same time.
    Blocks: until `options.limits`; the work runs in a thread that can be abandoned, and which
        holds `image` until `options.watch.has_ended`.

    Args:
        store: Where to; nothing that is committed there is touched (CK-2).
        state: Describes `image`.
        image: [bytes] uint8, must not change before the return.
        options: Split size, limits, and whether this rank writes bulk.
    Returns:
        Record for `commit`; small, without any tensor's bytes.
    Raises:
        StorageFailed: StorageFull, StorageDenied, StorageVanished, StorageHung or another refusal.
        LayoutMismatch: An entry that doesn't fit the image or has no form in the file.
    """
    chosen = options or WriteOptions()
    check_state(state, image)
    name = names.name_of(state)
    return bounded(
        lambda watch: _Shard(store, state, image, chosen, watch).write(),
        chosen.limits,
        doing=f"writing rank {state.rank} of {name} to {store.location}",
        watch=chosen.watch,
    )


def check_state(state: RankState, image: memoryview) -> None:
    """Raises LayoutMismatch, naming the entry, where description and image don't fit."""
    seen: set[str] = set()
    for entry in state.entries:
        size = element_bytes(entry.dtype, entry.name)
        for length in entry.shape:
            size *= length
        end = entry.offset + entry.size_bytes
        if entry.name in seen or entry.name == METADATA or not entry.name:
            raise LayoutMismatch(f"an entry is called '{entry.name}', which is taken")
        if size != entry.size_bytes:
            raise LayoutMismatch(
                f"{entry.name}: {entry.size_bytes} bytes, but {entry.dtype} of {entry.shape} "
                f"has {size}"
            )
        if entry.offset < 0 or end > image.nbytes:
            raise LayoutMismatch(f"{entry.name} ends at {end} of an image of {image.nbytes} bytes")
        if not len(entry.shape) == len(entry.global_shape) == len(entry.global_offset):
            raise LayoutMismatch(f"{entry.name}: local and global shape differ in dimensions")
        seen.add(entry.name)


class _Shard:
    """One call of `write_rank`."""

    def __init__(
        self,
        store: Store,
        state: RankState,
        image: memoryview,
        options: WriteOptions,
        watch: Watch,
    ) -> None:
        self._store = store
        self._state = state
        self._image = image.cast("B") if image.format != "B" or image.ndim != 1 else image
        self._options = options
        self._watch = watch
        name = names.name_of(state)
        self._folder = store.staging(name)
        self._cut = _cut_into_files(state.entries, options.split_bytes)

    def write(self) -> ShardRecord:
        state, options = self._state, self._options
        done = committed_record(self._store, self._folder, state)
        if done is not None:
            return done
        side = msgspec.msgpack.encode(state)
        self._check_space(len(side))
        self._store.make_folder(self._folder)
        mark(self._store, self._folder, state)
        files = [self._write_file(names.side_file(state.rank), b"", [memoryview(side)])]
        layout: list[LayoutEntry] = []
        if options.writes_bulk:
            files += [self._write_bulk(part, cuts) for part, cuts in enumerate(self._cut, 1)]
            layout = [_layout_entry(e) for e in state.entries if _is_first_part(e)]
        return _record(state, options.writes_bulk, files, layout)

    def _check_space(self, side_bytes: int) -> None:
        bulk = self._state.image_bytes if self._options.writes_bulk else 0
        need = bulk + side_bytes + MARGIN_BYTES
        need_files = MARGIN_FILES + (len(self._cut) if self._options.writes_bulk else 0)
        self._watch.at = self._store.location
        free = self._store.free()
        if free is None:
            return
        if free.byte_count < need:
            raise StorageFull(
                f"{self._store.location} has {free.byte_count} bytes free, rank "
                f"{self._state.rank} needs {need}; free space there, or keep fewer checkpoints"
            )
        if free.file_count is not None and free.file_count < need_files:
            raise StorageFull(
                f"{self._store.location} can take {free.file_count} more files (inodes), rank "
                f"{self._state.rank} needs {need_files}; delete files there"
            )

    def _write_bulk(self, part: int, cuts: Sequence[_Cut]) -> FileRecord:
        by_name = {cut.entry.name: cut for cut in cuts}
        pieces = in_file_order([self._piece(cut) for cut in cuts])
        facts = {"rank": str(self._state.rank), "step": str(self._state.step)}
        header = make_header(pieces, facts)
        bodies = [self._bytes_of(by_name[piece.name]) for piece in pieces]
        return self._write_file(
            names.bulk_file(self._state.rank, part, len(self._cut)), header, bodies
        )

    def _bytes_of(self, cut: _Cut) -> memoryview:
        begin = cut.entry.offset + cut.begin
        return self._image[begin : begin + cut.size_bytes]

    def _piece(self, cut: _Cut) -> Piece:
        entry = cut.entry
        shape, offset = entry.shape, entry.global_offset
        if shape:
            shape = (cut.row_count, *shape[1:])
            offset = (offset[0] + cut.first_row, *offset[1:])
        hasher = hashing.Hasher()
        for chunk in _chunks(self._bytes_of(cut), self._options.chunk_bytes):
            hasher.update(chunk)
            self._watch.moved(0)
        return Piece(
            name=entry.name,
            kind=entry.kind,
            dtype=entry.dtype,
            shape=shape,
            global_shape=entry.global_shape,
            global_offset=offset,
            is_sharded=entry.is_sharded,
            begin=cut.begin,
            size_bytes=cut.size_bytes,
            xxh3=hasher.hexdigest(),
        )

    def _write_file(self, name: str, header: bytes, bodies: Sequence[memoryview]) -> FileRecord:
        path = f"{self._folder}/{name}"
        self._watch.at = f"{self._store.location}/{path}"

        def attempt() -> FileRecord:
            return self._stream(path, name, header, bodies)

        return retrying(attempt, self._store.retries, doing="writing", path=self._watch.at)

    def _stream(
        self, path: str, name: str, header: bytes, bodies: Sequence[memoryview]
    ) -> FileRecord:
        """One attempt at one file."""
        hasher, size = hashing.Hasher(), 0
        output = self._store.create(path)
        try:
            for data in (memoryview(header), *bodies):
                for chunk in _chunks(data, self._options.chunk_bytes):
                    hasher.update(chunk)
                    output.write(chunk)
                    size += len(chunk)
                    self._watch.moved(len(chunk))
            self._watch.moved(0)  # nothing gets its name after it has been given up
            output.finish()
        except BaseException:
            output.abandon()
            raise
        return FileRecord(
            path=name,
            rank=self._state.rank,
            size_bytes=size,
            xxh3=hasher.hexdigest(),
            header_bytes=len(header),
            header_xxh3=hashing.checksum(header) if header else "",
        )


def committed_record(store: Store, folder: str, state: RankState) -> ShardRecord | None:
    """The record of a shard that is committed already, where it would be written over.

    An object store has no staging directory: a save that is repeated after its commit (a controller
    died before it knew) must not touch what counts (CK-2). Elsewhere `folder` never has a manifest
    that counts.
    """
    if folder != names.name_of(state) or names.MANIFEST not in store.list_files(folder):
        return None
    try:
        manifest = read_manifest(store, folder)
    except ManifestCorrupt:
        return None  # counts for nothing, and is written anew
    if manifest.run_id != state.run_id or manifest.world_size != state.world_size:
        raise CheckpointError(
            f"{store.location}/{folder} is a checkpoint of run {manifest.run_id} with "
            f"{manifest.world_size} ranks and is not written over; use another place"
        )
    files = [file for file in manifest.files if file.rank == state.rank]
    has_bulk = manifest.ranks[state.rank].bulk_rank == state.rank
    return _record(state, has_bulk, files, manifest.layout)


def _record(
    state: RankState,
    writes_bulk: bool,
    files: Sequence[FileRecord],
    layout: Sequence[LayoutEntry],
) -> ShardRecord:
    return ShardRecord(
        rank=state.rank,
        world_size=state.world_size,
        step=state.step,
        lineage=state.lineage,
        generation=state.generation,
        run_id=state.run_id,
        identity=state.identity,
        bulk_digest=state.bulk_digest,
        writes_bulk=writes_bulk,
        files=tuple(files),
        layout=tuple(layout),
        loss=state.loss,
        is_suspect=state.is_suspect,
    )


def _is_first_part(entry: ImageEntry) -> bool:
    """True for the part at the origin; an empty part of a tensor that isn't empty is none."""
    return not any(entry.global_offset) and (0 not in entry.shape or 0 in entry.global_shape)


def _layout_entry(entry: ImageEntry) -> LayoutEntry:
    return LayoutEntry(
        name=entry.name,
        kind=entry.kind,
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        grid=grid_of(entry.shape, entry.global_shape),
    )


def _chunks(data: memoryview, size: int) -> Iterator[memoryview]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


def _cut_into_files(entries: Sequence[ImageEntry], split_bytes: int) -> list[list[_Cut]]:
    """Cuts per file, filled in order; an entry larger than a file is cut between its rows."""
    files: list[list[_Cut]] = [[]]
    room = split_bytes
    for entry in entries:
        for cut in _cuts(entry, split_bytes):
            # Two cuts of one entry never share a file: there its name must be unique.
            if files[-1] and (cut.size_bytes > room or cut.first_row > 0):
                files.append([])
                room = split_bytes
            files[-1].append(cut)
            room -= cut.size_bytes
    return files


def _cuts(entry: ImageEntry, split_bytes: int) -> Iterator[_Cut]:
    rows = entry.shape[0] if entry.shape else 1
    row_bytes = entry.size_bytes // rows if rows else 0
    per_file = max(1, split_bytes // row_bytes) if row_bytes else max(1, rows)
    if rows <= per_file:
        yield _Cut(entry, 0, rows, 0, entry.size_bytes)
        return
    for first in range(0, rows, per_file):
        count = min(per_file, rows - first)
        yield _Cut(entry, first, count, first * row_bytes, count * row_bytes)
