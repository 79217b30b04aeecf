"""The manifest: which files make a checkpoint, and what it is a checkpoint of.

Decides what a manifest says, when it is valid, and how ranks' records become one. It does not touch
storage (`commit`), and it holds no entry's checksum: those stand in the files' headers, whose own
checksum stands here, so that a manifest stays small for thousands of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from trainmover.checkpoint import hashing, names
from trainmover.errors import CheckpointError, ConfigError, ManifestCorrupt

FORMAT: Final = 1


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint's directory."""
    rank: int
    size_bytes: int
    xxh3: str
    """Checksum of the whole file."""
    header_bytes: int = 0
    """Length of a bulk file's beginning up to the first tensor; 0 for side files."""
    header_xxh3: str = ""
    """Checksum of that beginning."""


class LayoutEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the job as a whole."""

    name: str
    kind: str
    dtype: str
    global_shape: tuple[int, ...]
    grid: tuple[int, ...]
    """Parts along each dimension; ones where it is not sharded."""


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer reports of one rank, and what `commit` needs of it. Holds no tensor bytes."""

    rank: int
    world_size: int
    step: int
    lineage: int
    generation: int
    run_id: str
    identity: str
    bulk_digest: int
    writes_bulk: bool
    files: tuple[FileRecord, ...]
    layout: tuple[LayoutEntry, ...]
    """Entries whose first part this rank wrote: every entry of the job is told exactly once."""
    loss: tuple[tuple[str, str], ...] = ()
    is_suspect: bool = False


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in a manifest."""

    rank: int
    identity: str
    bulk_digest: int
    bulk_rank: int
    """Rank whose files hold the bulk state: its own, or that of a replica."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A committed checkpoint."""

    format: int
    checksums: str
    """Algorithm of every checksum here and in the files."""
    run_id: str
    step: int
    lineage: int
    generation: int
    """In which the shards were written."""
    term: int
    """Of the controller that committed."""
    consistency_point: str
    """What the state is the state of."""
    world_size: int
    is_suspect: bool
    loss: tuple[tuple[str, str], ...]
    created_at: float
    """Seconds since the epoch, for people; decides nothing."""
    ranks: tuple[RankRecord, ...]
    files: tuple[FileRecord, ...]
    layout: tuple[LayoutEntry, ...]
    begun_from: str = ""
    """Run whose checkpoint this run was started from; empty: it began by itself."""
    history: tuple[str, ...] = ()
    """Runs that this one continues, nearest first: they can commit nothing any more, and their
    checkpoints are counted with this run's."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(file.size_bytes for file in self.files)

    def repeats(self, other: Manifest) -> bool:
        """True if every rank's bulk state is that of `other`, a checkpoint of another step.

        Training that moves nothing, or a writer that reads the wrong memory (C23): worth an alarm.
        """
        ours = [record.bulk_digest for record in self.ranks]
        return self.step != other.step and ours == [record.bulk_digest for record in other.ranks]

    def files_of(self, rank: int) -> tuple[FileRecord, ...]:
        """Every file that `rank` needs, its side file first. Raises CheckpointError."""
        bulk_rank = self.rank_record(rank).bulk_rank
        side = names.side_file(rank)
        bulk = [f for f in self.files if f.rank == bulk_rank and f.header_bytes]
        return (self.file(side), *bulk)

    def rank_record(self, rank: int) -> RankRecord:
        """Record of `rank`. Raises CheckpointError."""
        if not 0 <= rank < len(self.ranks):
            raise CheckpointError(
                f"there is no rank {rank} in a checkpoint of world size {self.world_size}"
            )
        return self.ranks[rank]

    def file(self, path: str) -> FileRecord:
        """Record of the file `path`. Raises CheckpointError."""
        found = next((file for file in self.files if file.path == path), None)
        if found is None:
            raise CheckpointError(f"the manifest names no file {path}")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Authority:
    """By which right somebody commits."""

    term: int
    """Of the controller."""
    generation: int
    """Current one; not below that of the shards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a run comes from."""

    begun_from: str = ""
    history: tuple[str, ...] = ()


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    checksum: str
    manifest: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """The manifest as a file: JSON with the checksum of its own body."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return b'{"checksum":"%s","manifest":%s}\n' % (hashing.checksum(body).encode(), body)


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`. Raises ManifestCorrupt, naming `where`."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.manifest)
        if hashing.checksum(body) != envelope.checksum:
            raise ManifestCorrupt(f"{where}: the body differs from its checksum")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ManifestCorrupt(f"{where}: not a manifest: {error}") from error
    problem = _problem(manifest)
    if problem:
        raise ManifestCorrupt(f"{where}: {problem}")
    return manifest


def _problem(manifest: Manifest) -> str:
    """Why a manifest can't be used; empty if it can."""
    if manifest.format != FORMAT:
        return f"format {manifest.format} instead of {FORMAT}; use the trainmover that wrote it"
    if manifest.checksums != hashing.ALGORITHM:
        return f"checksums are {manifest.checksums}, this trainmover knows {hashing.ALGORITHM}"
    if [record.rank for record in manifest.ranks] != list(range(manifest.world_size)):
        return f"it does not name ranks 0 to {manifest.world_size - 1}"
    paths = [file.path for file in manifest.files]
    if len(set(paths)) != len(paths):
        return "it names a file twice"
    for file in manifest.files:
        if not names.is_own_file(file.path) or "/" in file.path:
            return f"'{file.path}' is no file of a checkpoint"
        sums = [file.xxh3, file.header_xxh3] if file.header_bytes else [file.xxh3]
        if file.size_bytes < 0 or not all(map(hashing.is_checksum, sums)):
            return f"{file.path} has no size or no checksum"
    missing = _missing_file(manifest.ranks, manifest.files)
    return f"it names no {missing}" if missing else ""


def _missing_file(ranks: Iterable[RankRecord], files: Iterable[FileRecord]) -> str:
    """A file that a rank needs and that is not named; empty if there is none."""
    listed = list(files)
    sides = {file.path for file in listed}
    with_bulk = {file.rank for file in listed if file.header_bytes}
    for record in ranks:
        if names.side_file(record.rank) not in sides:
            return names.side_file(record.rank)
        if record.bulk_rank not in with_bulk:
            return f"bulk file of rank {record.bulk_rank}"
    return ""


def _bulk_of(record: ShardRecord) -> tuple[str, int]:
    return record.identity, record.bulk_digest


def build(
    records: Sequence[ShardRecord],
    authority: Authority,
    created_at: float,
    origin: Origin | None = None,
) -> Manifest:
    """One manifest of all ranks' records. Raises CheckpointError where they don't fit together."""
    origin = origin or Origin()
    ordered = sorted(records, key=lambda record: record.rank)
    if not ordered:
        raise CheckpointError("a checkpoint without shards can't be committed")
    first = ordered[0]
    expected = list(range(first.world_size))
    if [record.rank for record in ordered] != expected:
        found = [record.rank for record in ordered]
        raise CheckpointError(f"expected one shard record of each rank {expected}, got {found}")
    for record in ordered:
        _check_alike(first, record)
    # By value too: ranks of equal names and shapes may hold other values.
    writers = {_bulk_of(record): record.rank for record in reversed(ordered) if record.writes_bulk}
    homeless = [record.rank for record in ordered if _bulk_of(record) not in writers]
    if homeless:
        raise CheckpointError(
            f"nobody wrote the bulk state of ranks {homeless}: one rank of each identity must"
        )
    return Manifest(
        format=FORMAT,
        checksums=hashing.ALGORITHM,
        run_id=first.run_id,
        step=first.step,
        lineage=first.lineage,
        generation=first.generation,
        term=authority.term,
        consistency_point=f"every rank's state as it enters step {first.step}",
        world_size=first.world_size,
        is_suspect=any(record.is_suspect for record in ordered),
        loss=next((record.loss for record in ordered if record.loss), ()),
        created_at=created_at,
        ranks=tuple(
            RankRecord(
                rank=record.rank,
                identity=record.identity,
                bulk_digest=record.bulk_digest,
                bulk_rank=record.rank if record.writes_bulk else writers[_bulk_of(record)],
            )
            for record in ordered
        ),
        files=tuple(file for record in ordered for file in record.files),
        layout=_layout(ordered, set(writers.values())),
        begun_from=origin.begun_from,
        history=origin.history,
    )


def _check_alike(first: ShardRecord, record: ShardRecord) -> None:
    for field in ("step", "lineage", "generation", "run_id", "world_size"):
        ours, theirs = getattr(first, field), getattr(record, field)
        if ours != theirs:
            raise CheckpointError(
                f"ranks {first.rank} and {record.rank} wrote different {field}s, {ours} and "
                f"{theirs}: no checkpoint mixes them"
            )


def _layout(records: Sequence[ShardRecord], writers: set[int]) -> tuple[LayoutEntry, ...]:
    """Every entry once; of replicas that both wrote, the lower rank's word."""
    found: dict[str, LayoutEntry] = {}
    for record in records:
        if record.rank in writers:
            for entry in record.layout:
                found.setdefault(entry.name, entry)
    return tuple(found[name] for name in sorted(found))


def grid_of(shape: Sequence[int], global_shape: Sequence[int]) -> tuple[int, ...]:
    """Parts along each dimension, from the first part's shape (torch cuts by ceiling division)."""
    if len(shape) != len(global_shape):
        raise ConfigError(f"shape {shape} and global shape {global_shape} differ in dimensions")
    return tuple(
        -(-whole // part) if part else 1 for part, whole in zip(shape, global_shape, strict=True)
    )
