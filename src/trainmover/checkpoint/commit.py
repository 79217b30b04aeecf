"""The commit: all shards are known, the manifest is written, and from one rename on it counts.

Decides when a commit is refused (CK-5) and that nothing but the staging directory is touched
(CK-2). On a file system the manifest goes into the staging directory, last, and the rename of the
directory is the commit; on an object store the put of the manifest is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmover.checkpoint import names
from trainmover.checkpoint.bounded import Limits, Watch, bounded
from trainmover.checkpoint.manifest import Authority, Manifest, Origin, ShardRecord, build, encode
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed, survey
from trainmover.errors import CheckpointFenced, ShardMissing


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitOptions:
    """How a commit is made."""

    present_ranks: frozenset[int] | None = None
    """Ranks whose files lie on this store; None: all. A machine's own disk has its ranks' only."""
    limits: Limits = field(default_factory=Limits)
    created_at: float | None = None
    """Seconds since the epoch; None: now."""
    origin: Origin = field(default_factory=Origin)
    """Of the run."""


def commit(
    store: Store,
    records: Sequence[ShardRecord],
    authority: Authority,
    *,
    options: CommitOptions | None = None,
) -> Committed:
    """Make the shards that `records` tell of a checkpoint; durable on return.

    Called on: one process, once every rank's record is there. Calling it again is harmless.
    Blocks: until `options.limits`.

    Returns:
        The checkpoint with its name; the one that is there already if this very version is.
    Raises:
        CheckpointFenced: A later term or generation of this run has committed, or a run that
            continues it.
        ShardMissing: A file that a record tells of is not there with its size.
        CheckpointError: The records don't fit together.
        StorageFailed: As for `write_rank`. After StorageHung the commit may still happen.
    """
    chosen = options or CommitOptions()
    created_at = time.time() if chosen.created_at is None else chosen.created_at
    manifest = build(records, authority, created_at, chosen.origin)
    return commit_manifest(store, manifest, authority, options=chosen)


def commit_manifest(
    store: Store,
    manifest: Manifest,
    authority: Authority,
    *,
    options: CommitOptions | None = None,
) -> Committed:
    """Commit files that are there already under a manifest that exists: a copy on another tier.

    The manifest stays as it is, so that copies on all tiers are known as the same checkpoint.
    Otherwise as `commit`.
    """
    chosen = options or CommitOptions()
    return bounded(
        lambda watch: _commit(store, manifest, authority, chosen, watch),
        chosen.limits,
        doing=f"committing step {manifest.step} to {store.location}",
    )


def _commit(
    store: Store, manifest: Manifest, authority: Authority, options: CommitOptions, watch: Watch
) -> Committed:
    watch.at = store.location
    found = survey(store).committed
    check_fence(found, manifest.run_id, authority, store.location)
    same = next((c for c in found if _is_same(c.manifest, manifest)), None)
    if same is not None:
        return same
    name = names.name_of(manifest)
    folder = store.staging(name)
    _check_files(store, folder, manifest, options.present_ranks)
    _drop_partials(store, folder)
    watch.moved()
    store.put(f"{folder}/{names.MANIFEST}", encode(manifest))
    watch.moved()
    published = store.publish(folder, name)
    store.delete_file(f"{published}/{names.MARKER}")
    return Committed(name=published, manifest=manifest)


def check_fence(
    found: Sequence[Committed], run_id: str, authority: Authority, location: str
) -> None:
    """Raises CheckpointFenced if a later term or generation of this run has committed, or a run
    that continues it (CK-5)."""
    for committed in found:
        other = committed.manifest
        if run_id in other.history:
            raise CheckpointFenced(
                f"{location}/{committed.name} was committed by run {other.run_id}, which continues "
                f"{run_id}: this job has been started anew elsewhere, end it; its earlier "
                "checkpoints are untouched"
            )
        if other.run_id != run_id:
            continue
        if other.term > authority.term or other.generation > authority.generation:
            raise CheckpointFenced(
                f"{location}/{committed.name} was committed in term {other.term}, generation "
                f"{other.generation}; this writer is of term {authority.term}, generation "
                f"{authority.generation} and has been replaced"
            )


def _is_same(there: Manifest, ours: Manifest) -> bool:
    """The same version of the same run, written in the same generation: equal bit for bit."""
    key = ("run_id", "step", "lineage", "generation", "world_size")
    return all(getattr(there, field) == getattr(ours, field) for field in key)


def _drop_partials(store: Store, folder: str) -> None:
    """Files of killed or abandoned attempts don't go along into the checkpoint."""
    for file in store.list_files(folder):
        if names.is_partial(file):
            store.delete_file(f"{folder}/{file}")


def _check_files(
    store: Store, folder: str, manifest: Manifest, present_ranks: frozenset[int] | None
) -> None:
    sizes = store.list_files(folder)
    for file in manifest.files:
        if present_ranks is not None and file.rank not in present_ranks:
            continue
        if sizes.get(file.path) != file.size_bytes:
            seen = f"has {sizes[file.path]} bytes" if file.path in sizes else "is not there"
            raise ShardMissing(
                f"{store.location}/{folder}/{file.path} {seen}, rank {file.rank} reported "
                f"{file.size_bytes} bytes; nothing was committed"
            )
