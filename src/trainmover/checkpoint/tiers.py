"""Looks through tiers for what can be restored, and opens what was chosen.

Decides how deep a look goes. `choice` decides what is taken; where checksums find something broken
that sizes did not show, it is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from trainmover.checkpoint.bounded import Watch
from trainmover.checkpoint.choice import Asked, Choice, Found, Passed, choose
from trainmover.checkpoint.failures import named
from trainmover.checkpoint.reader import Checkpoint
from trainmover.checkpoint.store import Store
from trainmover.checkpoint.survey import Committed, survey
from trainmover.errors import CheckpointError, NothingToRestore

LOOKS: Final = 5
"""How often a choice is begun anew because a running job has pruned what was being read."""
_Seen = tuple[list[Found], list[Passed]]


def look(tier: str, store: Store) -> tuple[list[Found], list[Passed]]:
    """Everything committed on one tier, with files that are missing or have another size.

    Args:
        tier: Name for reports.
        store: What to look through; no shard is opened.
    Returns:
        What may be restored, and directories that are no valid checkpoint.
    Raises:
        StorageFailed: The tier can't be listed.
    """
    try:
        seen = survey(store)
        found = [
            Found(tier=tier, name=c.name, manifest=c.manifest, broken=missing_files(store, c))
            for c in seen.committed
        ]
    except OSError as error:
        raise named(error, "looking through", store.location) from error
    return found, [Passed(name=r.name, tier=tier, reason=r.reason) for r in seen.rejected]


def missing_files(store: Store, committed: Committed) -> dict[str, str]:
    """Files that are not there with the manifest's size, with what is there; none is opened."""
    sizes = store.list_files(committed.name)
    broken: dict[str, str] = {}
    for file in committed.manifest.files:
        if file.path not in sizes:
            broken[file.path] = "missing"
        elif sizes[file.path] != file.size_bytes:
            broken[file.path] = f"{sizes[file.path]} bytes instead of {file.size_bytes}"
    return broken


def pick(
    stores: Mapping[str, Store],
    asked: Asked | None = None,
    *,
    checks_bytes: bool = True,
    watch: Watch | None = None,
) -> Choice | None:
    """The checkpoint to restore from these tiers; None for a fresh start.

    Called on: one process for the whole job; all ranks are given the same answer.
    Blocks: for as long as reading the chosen files takes; run it inside `reader.load`.

    Args:
        stores: Tiers by name, best first.
        asked: As for `choose`.
        checks_bytes: Compare every chosen file with its checksum before it is decided; otherwise
            the reading ranks find out, and the group has to choose again.
        watch: Told of progress.
    Raises:
        NothingToRestore: As `choose`.
        StorageFailed: No tier can be listed.
    """
    seen = _look_through(stores)
    for _ in range(LOOKS - 1):
        try:
            return _pick(stores, asked, seen, checks_bytes, watch)
        except NothingToRestore:
            again = _look_through(stores)
            if _names(again) == _names(seen):
                raise
            seen = again  # a running job has saved and pruned while we read
    return _pick(stores, asked, seen, checks_bytes, watch)


def _look_through(stores: Mapping[str, Store]) -> _Seen:
    found: list[Found] = []
    rejected: list[Passed] = []
    failures: list[CheckpointError] = []
    for tier, store in stores.items():
        try:
            here, bad = look(tier, store)
        except CheckpointError as error:
            failures.append(error)
            rejected.append(Passed(name="everything", tier=tier, reason=str(error)))
            continue
        found += here
        rejected += bad
    if failures and len(failures) == len(stores):
        raise failures[0]
    return found, rejected


def _names(seen: _Seen) -> list[tuple[str, str]]:
    return [(item.tier, item.name) for item in seen[0]]


def _pick(
    stores: Mapping[str, Store],
    asked: Asked | None,
    seen: _Seen,
    checks_bytes: bool,
    watch: Watch | None,
) -> Choice | None:
    found, rejected = seen
    while True:
        chosen = choose(found, asked, rejected)
        if chosen is None or not checks_bytes:
            return chosen
        broken = _broken(stores, chosen, watch)
        if not broken:
            return chosen
        found = [_with_broken(item, chosen.name, broken) for item in found]


def _broken(
    stores: Mapping[str, Store], chosen: Choice, watch: Watch | None
) -> dict[tuple[str, str], str]:
    """Tier and file of each chosen file that differs from its checksum."""
    broken: dict[tuple[str, str], str] = {}
    for tier in chosen.tiers():
        checkpoint = Checkpoint(
            (stores[tier],), Committed(name=chosen.name, manifest=chosen.manifest), watch
        )
        mine = {path for path, source in chosen.sources if source == tier}
        for damage in checkpoint.verify(only=mine):
            broken[tier, damage.path] = damage.reason
    return broken


def _with_broken(item: Found, name: str, broken: Mapping[tuple[str, str], str]) -> Found:
    more = {path: why for (tier, path), why in broken.items() if tier == item.tier}
    return replace(item, broken={**item.broken, **more}) if item.name == name else item


def open_choice(
    stores: Mapping[str, Store], chosen: Choice, *, watch: Watch | None = None
) -> Checkpoint:
    """The chosen checkpoint; each file is tried first on the tier that was chosen for it.

    The manifest is the chosen one: whoever is told of a choice needs no manifest on its own disk.
    """
    first = chosen.tiers()
    rest = [tier for tier in stores if tier not in first]
    ordered = [stores[tier] for tier in (*first, *rest) if tier in stores]
    return Checkpoint(ordered, Committed(name=chosen.name, manifest=chosen.manifest), watch)
