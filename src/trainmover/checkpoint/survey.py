"""What is on a store: committed checkpoints by their manifests, and what else looks like one.

Decides what counts as committed (CK-1): a directory with a name of ours and a manifest that agrees
with its checksum. Which one is taken is `choice`'s to decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmover.checkpoint import names
from trainmover.checkpoint.bounded import Watch
from trainmover.checkpoint.failures import named
from trainmover.checkpoint.manifest import Manifest, decode
from trainmover.checkpoint.order import order_key
from trainmover.checkpoint.store import Store
from trainmover.errors import CheckpointError, ManifestMissing


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A checkpoint with a valid manifest."""

    name: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A directory with a checkpoint's name that is none, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Everything found on one store."""

    location: str
    committed: tuple[Committed, ...]
    """Oldest first, by run, lineage and step; never by name."""
    rejected: tuple[Rejected, ...]


def survey(store: Store, watch: Watch | None = None) -> Survey:
    """Read every manifest of a store; shards are not opened. Raises StorageFailed."""
    committed: list[Committed] = []
    rejected: list[Rejected] = []
    for name in store.list_folders():
        if watch is not None:
            watch.moved()
        found = _look(store, name)
        if isinstance(found, Committed):
            committed.append(found)
        elif found is not None:
            rejected.append(found)
    committed.sort(key=lambda c: (c.manifest.run_id, *order_key(c.manifest), c.name))
    return Survey(location=store.location, committed=tuple(committed), rejected=tuple(rejected))


def _look(store: Store, name: str) -> Committed | Rejected | None:
    if not names.is_checkpoint_name(name):
        return None
    try:
        return Committed(name=name, manifest=read_manifest(store, name))
    except (CheckpointError, OSError) as error:
        return Rejected(name=name, reason=str(error))


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of checkpoint `name`.

    Raises:
        ManifestMissing: There is no such directory, or nothing was committed in it.
        ManifestCorrupt: It contradicts its checksum.
        StorageFailed: It can't be read.
    """
    path = f"{name}/{names.MANIFEST}"
    files = store.list_files(name)
    if names.MANIFEST not in files:
        other = sorted(f for f in files if f.lower() == names.MANIFEST.lower())
        hint = f"; there is {other[0]}: the copy changed the case of names" if other else ""
        shards = f"it holds {len(files)} files" if files else "it is empty or not there"
        raise ManifestMissing(
            f"{store.location}/{name} has no {names.MANIFEST}{hint}; {shards}, and was never "
            "committed or is being deleted"
        )
    try:
        data = store.read(path)
    except OSError as error:
        raise named(error, "reading", f"{store.location}/{path}") from error
    return decode(data, f"{store.location}/{path}")
