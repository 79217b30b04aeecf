"""The tiers of a job, what can be restored from them, and how a checkpoint on several is opened.

Decides which directories are tiers and how deep a look goes. `choice` decides what is taken; where
checksums find something broken that sizes did not show, it is asked again. A tier that gives no
answer is left out as long as another one has what is needed.

Machines' disks are looked at where they can be seen from here, all of them where one host plays all
machines; those of other hosts are stores that their agents serve (`remote_disk`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from trainmover.checkpoint import names
from trainmover.checkpoint.bounded import LOAD_LIMITS, Limits, Relay, Watch, bounded
from trainmover.checkpoint.choice import Asked, Choice, Found, Passed, choose, fingerprint
from trainmover.checkpoint.failures import named
from trainmover.checkpoint.reader import Checkpoint, Damage
from trainmover.checkpoint.remote_disk import RemoteDisk
from trainmover.checkpoint.store import Store, open_store
from trainmover.checkpoint.survey import Committed, read_manifest, survey
from trainmover.errors import (
    CheckpointError,
    ConfigError,
    ManifestMissing,
    NothingToRestore,
    StorageFailed,
)
from trainmover.topology.keeping import CheckpointConfig

A = TypeVar("A")
T = TypeVar("T")

LOOKS: Final = 5
"""How often a choice is begun anew because a running job has pruned what was being read."""
AT_ONCE: Final = 32
"""Tiers that are looked at side by side."""
DURABLE: Final = "durable"
"""Tier that every machine reaches."""
EVERYTHING: Final = "everything"
"""Name of what is passed over where a tier as a whole has given no answer."""
_Seen = tuple[list[Found], list[Passed]]


def disk_name(machine: str) -> str:
    """Name of a machine's disk among the tiers."""
    return f"disk of {machine}"


def open_disk(config: CheckpointConfig, machine: str) -> Store:
    """The tier on the disk of `machine`. Raises ConfigError."""
    folder = names.check_relative(machine)
    if "/" in folder:
        raise ConfigError(f"machine '{machine}' can't name a directory of its own disk's tier")
    return open_store(Path(config.local_directory) / folder)


def open_tiers(
    config: CheckpointConfig, machine: str = "", others: Mapping[str, Store] | None = None
) -> dict[str, Store]:
    """All tiers that can be seen from here, those to be read first in front.

    Args:
        config: Of the job.
        machine: Whose process asks; its own disk comes first.
        others: Disks of other machines, read behind those that are here.
    Raises: ConfigError.
    """
    here = {disk_name(name): disk for name, disk in open_disks(config, machine).items()}
    return {**here, **(others or {}), DURABLE: open_store(config.directory)}


def open_disks(config: CheckpointConfig, machine: str = "") -> dict[str, Store]:
    """Directories of the local tier that are here, that of `machine` first. Raises ConfigError."""
    seen = _machines_seen(config)
    own = [machine] if machine in seen else []
    return {name: open_disk(config, name) for name in (*own, *seen)}


def _machines_seen(config: CheckpointConfig) -> list[str]:
    """Machines whose disks are here; a disk that can't be listed is none."""
    if not config.local_directory:
        return []
    try:
        with os.scandir(config.local_directory) as found:
            return sorted(e.name for e in found if e.is_dir(follow_symlinks=False))
    except OSError:
        return []


def look(tier: str, store: Store, watch: Watch | None = None) -> tuple[list[Found], list[Passed]]:
    """Everything committed on one tier, with files that are missing or have another size.

    Args:
        tier: Name for reports.
        store: What to look through; no shard is opened.
        watch: Told of progress.
    Returns:
        What may be restored, and directories that are no valid checkpoint.
    Raises:
        StorageFailed: The tier can't be listed.
    """
    try:
        seen = survey(store, watch)
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
    limits: Limits | None = None,
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
        limits: Of the call around this one: of several tiers each may keep it waiting half as long.
    Raises:
        NothingToRestore: As `choose`.
        StorageFailed: No tier can be listed.
    """
    patience = _Patience(limits or LOAD_LIMITS, watch, is_last_hope=len(stores) == 1)
    seen = _look_through(stores, patience)
    for _ in range(LOOKS - 1):
        try:
            return _pick(stores, asked, seen, patience if checks_bytes else None)
        except NothingToRestore:
            again = _look_through(stores, patience)
            if _names(again) == _names(seen):
                raise
            seen = again  # a running job has saved and pruned while we read
    return _pick(stores, asked, seen, patience if checks_bytes else None)


class _Patience:
    """How long one of several tiers may keep everybody waiting: half of what all may."""

    def __init__(self, limits: Limits, watch: Watch | None, *, is_last_hope: bool) -> None:
        self._limits = replace(limits, stall_s=limits.stall_s / 2)
        self._watch = watch
        self._is_last_hope = is_last_hope

    def spend(self, work: Callable[[Watch], T], doing: str) -> T:
        """The result of `work`. Raises StorageHung, and what `work` raises."""
        relay = Relay(self._watch)
        if self._is_last_hope:
            return work(relay)
        return bounded(work, self._limits, doing=doing, watch=relay)


def _look_through(stores: Mapping[str, Store], patience: _Patience) -> _Seen:
    found: list[Found] = []
    rejected: list[Passed] = []
    failures: list[CheckpointError] = []

    def seen(tier: str) -> tuple[list[Found], list[Passed]] | CheckpointError:
        store = stores[tier]
        try:
            return patience.spend(partial(look, tier, store), f"looking through {store.location}")
        except CheckpointError as error:
            return error

    for tier, result in zip(stores, side_by_side(seen, list(stores)), strict=True):
        if isinstance(result, CheckpointError):
            failures.append(result)
            rejected.append(Passed(name=EVERYTHING, tier=tier, reason=str(result)))
            continue
        found += result[0]
        rejected += result[1]
    if failures and len(failures) == len(stores):
        raise failures[0]
    return found, rejected


def _names(seen: _Seen) -> list[tuple[str, str]]:
    return [(item.tier, item.name) for item in seen[0]]


def _pick(
    stores: Mapping[str, Store],
    asked: Asked | None,
    seen: _Seen,
    patience: _Patience | None,
) -> Choice | None:
    found, rejected = seen
    while True:
        chosen = choose(found, asked, rejected)
        if chosen is None or patience is None:
            return chosen
        broken = _broken(stores, chosen, patience)
        if not broken:
            return chosen
        found = [_with_broken(item, chosen.name, broken) for item in found]


def _broken(
    stores: Mapping[str, Store], chosen: Choice, patience: _Patience
) -> dict[tuple[str, str], str]:
    """Tier and file of each chosen file that differs from its checksum, or can't be read."""

    def verified(tier: str) -> dict[tuple[str, str], str]:
        mine = {path for path, source in chosen.sources if source == tier}
        work = partial(_verify, stores[tier], chosen, mine)
        try:
            damages = patience.spend(work, f"reading {chosen.name} on {stores[tier].location}")
        except StorageFailed as error:
            return {(tier, path): str(error) for path in mine}
        return {(tier, damage.path): damage.reason for damage in damages}

    broken: dict[tuple[str, str], str] = {}
    for result in side_by_side(verified, chosen.tiers()):
        broken.update(result)
    return broken


def side_by_side(work: Callable[[A], T], items: Sequence[A]) -> list[T]:
    """Results of `work`, in order; machines' disks are read at the same time."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(len(items), AT_ONCE), "checkpoint-tier") as pool:
        return list(pool.map(work, items))


def _verify(store: Store, chosen: Choice, paths: set[str], watch: Watch) -> Sequence[Damage]:
    if isinstance(store, RemoteDisk):
        return store.check(chosen.name, paths, watch)
    committed = Committed(name=chosen.name, manifest=chosen.manifest)
    return Checkpoint((store,), committed, watch).verify(only=paths)


def _with_broken(item: Found, name: str, broken: Mapping[tuple[str, str], str]) -> Found:
    more = {path: why for (tier, path), why in broken.items() if tier == item.tier}
    return replace(item, broken={**item.broken, **more}) if item.name == name else item


def open_named(
    stores: Mapping[str, Store], name: str, *, watch: Watch | None = None
) -> Iterator[Checkpoint]:
    """Checkpoint `name` for one rank of many, which knows no more of the choice than its name.

    Tiers are asked in their order. A version that was written to two of them by two tries has two
    manifests of the same state: what one of them lacks, the next one to come out may have.

    Raises:
        ManifestMissing: No tier has it; at the first step of the iteration.
    """
    seen: set[str] = set()
    problems: list[str] = []
    for store in stores.values():
        try:
            manifest = read_manifest(store, name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if fingerprint(manifest) not in seen:
            seen.add(fingerprint(manifest))
            committed = Committed(name=name, manifest=manifest)
            yield Checkpoint(tuple(stores.values()), committed, watch)
    if not seen:
        raise ManifestMissing("; ".join(problems))
