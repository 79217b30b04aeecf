"""Deletes checkpoints, and what interrupted saves and deletions have left.

Decides the order of a deletion (manifest first, then files: a half-deleted checkpoint is none, and
its deletion is finished next time) and what counts as a leftover of ours. Only files with names
that this package gives are removed, and a directory only once it is empty (CK-4).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainmover.checkpoint import names
from trainmover.checkpoint.marker import read_marker
from trainmover.checkpoint.retention import Retention, to_delete
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed, survey
from trainmover.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleaned:
    """What was removed, and what could not be."""

    deleted: tuple[str, ...] = ()
    """Checkpoints."""
    leftovers: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Why something is still there; the next cleaning tries again."""


def delete_checkpoint(store: Store, name: str) -> bool:
    """Delete a committed checkpoint; whether its directory has gone too.

    It counts no longer from the deletion of its manifest on. Files in its directory that this
    package has not written stay, and the directory with them.
    """
    data = store.read(f"{name}/{names.MANIFEST}")
    store.put(f"{name}/{names.DELETED}", data)
    store.delete_file(f"{name}/{names.MANIFEST}", is_durable=True)
    return _empty(store, store.retire(name), names.DELETED)


def _empty(store: Store, folder: str, last: str) -> bool:
    """Delete our files of a directory, `last` at the end, then the directory if it is empty."""
    files = [file for file in store.list_files(folder) if names.is_own_file(file)]
    for file in sorted(files, key=lambda file: (file == last, file)):
        store.delete_file(f"{folder}/{file}")
    return store.delete_folder(folder)


def prune(
    store: Store,
    policy: Retention,
    *,
    run_id: str,
    history: Sequence[str] = (),
    active: Collection[str] = (),
) -> Cleaned:
    """Delete what `policy` doesn't keep, finish interrupted deletions, remove leftovers.

    Called on: the process that commits, after a commit. Never raises for something that can't be
    deleted: the checkpoints that count are not in the way (C25).

    Args:
        store: Of the run.
        policy: What to keep.
        run_id: Nothing of another job is touched.
        history: Runs that `run_id` continues, nearest first: counted and cleaned with it.
        active: Names of checkpoints that are being written right now.
    """
    deleted: list[str] = []
    problems: list[str] = []
    committed = survey(store).committed
    for name in to_delete(committed, policy, run_id=run_id, history=history):
        try:
            if not delete_checkpoint(store, name):
                problems.append(f"{name}: files that are not ours keep the directory")
            deleted.append(name)
        except (CheckpointError, OSError) as error:
            problems.append(f"{name}: {error}")
    rest = clean_leftovers(store, run_id=run_id, history=history, active=active)
    return Cleaned(
        deleted=tuple(deleted),
        leftovers=rest.leftovers,
        problems=(*problems, *rest.problems),
    )


def clean_leftovers(
    store: Store, *, run_id: str, history: Sequence[str] = (), active: Collection[str] = ()
) -> Cleaned:
    """Remove what interrupted saves and deletions of this run and of those it continues have left.

    A save is taken for interrupted if something newer of its run has been committed and its name is
    not in `active`. Its writer, should it be alive after all, gets StorageVanished: it could commit
    nothing newer any more. A run that is continued has no save under way that could count.
    """
    committed = [c for c in survey(store).committed if c.manifest.run_id == run_id]
    past = frozenset(history) if committed else frozenset()
    cleaned: list[str] = []
    problems: list[str] = []
    for folder in store.list_folders():
        try:
            last = _leftover_of(store, folder, committed, active, past)
            if last is None:
                continue
            if _empty(store, folder, last):
                cleaned.append(folder)
            else:
                problems.append(f"{folder}: files that are not ours keep the directory")
        except (CheckpointError, OSError) as error:
            problems.append(f"{folder}: {error}")
    return Cleaned(leftovers=tuple(cleaned), problems=tuple(problems))


def _leftover_of(
    store: Store,
    folder: str,
    committed: list[Committed],
    active: Collection[str],
    past: Collection[str],
) -> str | None:
    """The file that is to be deleted last, if `folder` is a leftover; None if it is none."""
    name = folder.removeprefix(names.STAGING_PREFIX)
    if not names.is_checkpoint_name(name) or name in active:
        return None
    files = store.list_files(folder)
    if folder == name and names.MANIFEST in files:
        return None
    if names.DELETED in files:
        return names.DELETED
    marker = read_marker(store, folder)
    if marker is None:
        return _without_marker(folder, files, committed)
    is_older = any(
        (marker.lineage, marker.step) <= (c.manifest.lineage, c.manifest.step) for c in committed
    )
    mine = committed and marker.run_id == committed[0].manifest.run_id
    is_left = (mine and is_older) or marker.run_id in past
    return names.MARKER if is_left else None


def _without_marker(folder: str, files: Collection[str], committed: list[Committed]) -> str | None:
    """A staging directory without a finished marker, empty but for a partial one: a save that had
    hardly begun, or a deletion that had all but ended.

    Nothing says whose it is, but nothing is lost with it either.
    """
    version = names.version_of(folder.removeprefix(names.STAGING_PREFIX))
    is_older = any(version <= (c.manifest.lineage, c.manifest.step) for c in committed)
    is_bare = all(file.startswith(names.MARKER) and file != names.MARKER for file in files)
    is_staging = folder.startswith(names.STAGING_PREFIX)
    return names.MARKER if is_staging and is_older and is_bare else None
