"""Copies a checkpoint's files from one tier to another, in the background of training.

Decides that a copy is compared with the recorded checksum on its way and gets no name if it
differs. Who copies what, and how many machines at once, is the controller's to say. The commit on
the other tier is `commit.commit_manifest`, under the same manifest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from trainmover.checkpoint import hashing, names
from trainmover.checkpoint.bounded import Limits, Watch, bounded
from trainmover.checkpoint.failures import retrying
from trainmover.checkpoint.manifest import FileRecord
from trainmover.checkpoint.marker import mark
from trainmover.checkpoint.shard_files import CHUNK_BYTES
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed
from trainmover.errors import ShardCorrupt


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A checkpoint on one tier and the tier it goes to."""

    source: Store
    target: Store
    committed: Committed
    """As it is on the source."""


def copy_files(
    place: Place,
    *,
    ranks: Collection[int] | None = None,
    limits: Limits | None = None,
    watch: Watch | None = None,
) -> tuple[str, ...]:
    """Copy the files of `ranks` into the staging directory of the target.

    Called on: each machine, for the ranks whose files it has; at most a few at once.
    Blocks: until `limits`, in a thread that can be abandoned.

    Args:
        place: What, from where, to where.
        ranks: Whose files; None: all.
        limits: Longest silence and longest time.
        watch: To follow the progress.
    Returns:
        Files copied; those that are there with their size already are not copied again.
    Raises:
        ShardCorrupt: The source differs from the checksum.
        StorageFailed: As for `write_rank`.
    """
    chosen = limits or Limits()
    return bounded(
        lambda shared: _copy(place, ranks, shared),
        chosen,
        doing=f"copying {place.committed.name} to {place.target.location}",
        watch=watch,
    )


def _copy(place: Place, ranks: Collection[int] | None, watch: Watch) -> tuple[str, ...]:
    manifest = place.committed.manifest
    name = names.name_of(manifest)
    folder = place.target.staging(name)
    place.target.make_folder(folder)
    mark(place.target, folder, manifest)
    there = place.target.list_files(folder)
    copied: list[str] = []
    for file in manifest.files:
        is_wanted = ranks is None or file.rank in ranks
        if not is_wanted or there.get(file.path) == file.size_bytes:
            continue
        path = f"{folder}/{file.path}"
        watch.at = f"{place.target.location}/{path}"
        attempt = partial(_copy_file, place, file, path, watch)
        retrying(attempt, place.target.retries, doing="copying to", path=watch.at)
        copied.append(file.path)
    return tuple(copied)


def _copy_file(place: Place, file: FileRecord, path: str, watch: Watch) -> None:
    source_path = f"{place.committed.name}/{file.path}"
    shown = f"{place.source.location}/{source_path}"
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(file.size_bytes, 1))))
    hasher = hashing.Hasher()
    opened = place.source.open(source_path)
    try:
        output = place.target.create(path)
        try:
            for begin in range(0, file.size_bytes, CHUNK_BYTES):
                chunk = buffer[: min(CHUNK_BYTES, file.size_bytes - begin)]
                count = opened.read_into(begin, chunk)
                hasher.update(chunk[:count])
                output.write(chunk[:count])
                watch.moved(count)
            if hasher.hexdigest() != file.xxh3:
                raise ShardCorrupt(f"{shown} differs from its checksum; it is not copied")
            output.finish()
        except BaseException:
            output.abandon()
            raise
    finally:
        opened.close()
