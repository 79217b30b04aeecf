"""Shards and manifests out of an agent's memory or from its disk, through the checkpoint room.

Decides what a failure becomes: an event with its reason, never an exception of the agent. Each
call runs on a thread that may block as long as the checkpoint room allows; training goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from trainmover import agent
from trainmover.checkpoint import names
from trainmover.checkpoint.bounded import Limits
from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.commit import CommitOptions, commit, commit_manifest
from trainmover.checkpoint.copying import Place, copy_files
from trainmover.checkpoint.manifest import Authority, Origin, ShardRecord
from trainmover.checkpoint.retention import KeepLast
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.store import Store, open_store
from trainmover.checkpoint.survey import Committed, read_manifest
from trainmover.checkpoint.tiers import open_disk
from trainmover.checkpoint.writer import WriteOptions, write_rank
from trainmover.edges.snapshot_store import Kept, SnapshotStore
from trainmover.errors import ConfigError, ShardMissing, StateMismatch, TrainMoverError
from trainmover.protocol.messages import CommitCheckpoint, ShardWritten, Tier, WriteCheckpoint
from trainmover.topology.keeping import CheckpointConfig, Keeping

log = logging.getLogger(__name__)

LONGEST_STALL_S = 60.0


class DurableWriter:
    """Carries out `WriteCheckpoint` and `CommitCheckpoint`."""

    def __init__(
        self,
        machine: str,
        store: SnapshotStore,
        keeping: Callable[[], Keeping],
        post: Callable[[agent.Event], None],
    ) -> None:
        self._machine = machine
        self._images = store
        self._keeping = keeping
        self._post = post

    def write(self, order: WriteCheckpoint) -> None:
        """This machine's shards; posts `ShardsDone` or `CheckpointWriteFailed`."""
        started = time.monotonic()
        try:
            config = self._config()
            store = self._store(config, order.tier)
            if order.copied_from:
                shards = self._copy(store, config, order)
            else:
                shards = tuple(self._write_rank(store, config, order, rank) for rank in order.ranks)
        except (TrainMoverError, OSError) as error:
            self._failed(order, error)
            return
        self._post(
            agent.ShardsDone(
                number=order.number,
                version=order.version,
                shards=shards,
                seconds=time.monotonic() - started,
            )
        )

    def _store(self, config: CheckpointConfig, tier: Tier) -> Store:
        if tier == "disk":
            return open_disk(config, self._machine)
        return open_store(config.directory)

    def _on_disk(self, config: CheckpointConfig, name: str) -> tuple[Store, Committed]:
        """A checkpoint on this machine's disk. Raises CheckpointError."""
        disk = open_disk(config, self._machine)
        return disk, Committed(name=name, manifest=read_manifest(disk, name))

    def _copy(
        self, store: Store, config: CheckpointConfig, order: WriteCheckpoint
    ) -> tuple[ShardWritten, ...]:
        """Files of this machine's ranks; the manifest that is on the disk goes along at the end."""
        started = time.monotonic()
        disk, committed = self._on_disk(config, order.copied_from)
        place = Place(source=disk, target=store, committed=committed)
        copied = copy_files(place, ranks=order.ranks, limits=limits_of(config.write_timeout_s))
        taken_s = time.monotonic() - started
        log.info("copied %d files of %s, %.2f s", len(copied), committed.name, taken_s)
        return tuple(ShardWritten(rank=rank, record="") for rank in order.ranks)

    def _write_rank(
        self, store: Store, config: CheckpointConfig, order: WriteCheckpoint, rank: int
    ) -> ShardWritten:
        options = WriteOptions(
            writes_bulk=rank in order.bulk_ranks,
            split_bytes=config.split_bytes,
            limits=limits_of(config.write_timeout_s),
        )
        with self._images.reading(rank, order.version, is_for_storage=True) as kept:
            # One that was just taken again, as the job's last is, has no digest yet.
            is_whole = bool(kept.bulk_digest) or self._images.check(kept)
            state = rank_state(kept, order.generation)
            record = write_rank(store, state, kept.bulk(), options=options)
            if not is_whole or not kept.is_unchanged:
                raise StateMismatch(f"the snapshot of rank {rank} was overwritten while written")
        return ShardWritten(rank=rank, record=msgspec.json.encode(record).decode())

    def commit(self, order: CommitCheckpoint) -> None:
        """The manifest; posts `ManifestDone` or `CheckpointWriteFailed`."""
        try:
            config = self._config()
            store = self._store(config, order.tier)
            committed = self._commit(store, config, order)
        except (TrainMoverError, OSError, msgspec.MsgspecError) as error:
            self._failed(order, error)
            return
        self._post(
            agent.ManifestDone(
                number=order.number, version=order.version, name=committed.name, tier=order.tier
            )
        )
        self._prune(store, config, committed.manifest.run_id, order.history)

    def _commit(self, store: Store, config: CheckpointConfig, order: CommitCheckpoint) -> Committed:
        authority = Authority(term=order.term, generation=order.generation)
        limits = limits_of(config.write_timeout_s)
        if order.copied_from:
            _, committed = self._on_disk(config, order.copied_from)
            options = CommitOptions(limits=limits)
            return commit_manifest(store, committed.manifest, authority, options=options)
        records = [msgspec.json.decode(shard.record, type=ShardRecord) for shard in order.shards]
        options = CommitOptions(
            limits=limits,
            present_ranks=_present(store, records) if order.tier == "disk" else None,
            origin=Origin(begun_from=order.begun_from, history=order.history),
        )
        return commit(store, records, authority, options=options)

    @staticmethod
    def _prune(
        store: Store, config: CheckpointConfig, run_id: str, history: tuple[str, ...]
    ) -> None:
        """Old checkpoints go once the new one is durable; a failure here costs space only."""
        try:
            cleaned = prune(store, KeepLast(config.keep_last), run_id=run_id, history=history)
        except (TrainMoverError, OSError) as error:
            log.warning("old checkpoints could not be removed: %s", error)
            return
        for problem in cleaned.problems:
            log.warning("old checkpoints could not be removed: %s", problem)

    def _config(self) -> CheckpointConfig:
        config = self._keeping().checkpoint
        if not config.is_on:
            raise ConfigError("a checkpoint was ordered, but checkpoint.directory is not set")
        return config

    def _failed(self, order: WriteCheckpoint | CommitCheckpoint, error: Exception) -> None:
        log.warning("checkpoint %d at step %d: %s", order.number, order.version.step, error)
        self._post(
            agent.CheckpointWriteFailed(
                number=order.number, version=order.version, reason=str(error)
            )
        )


def _present(disk: Store, records: Sequence[ShardRecord]) -> frozenset[int]:
    """Ranks whose files are on this disk, under way or committed already. Raises ShardMissing."""
    name = names.name_of(records[0])
    files = {**disk.list_files(name), **disk.list_files(disk.staging(name))}
    present = [record.rank for record in records if all(f.path in files for f in record.files)]
    if not present:
        raise ShardMissing(f"{disk.location} has no shard of {name}: another disk than it was")
    return frozenset(present)


def limits_of(total_s: float) -> Limits:
    """Limits of one call within `total_s`."""
    return Limits(stall_s=min(LONGEST_STALL_S, total_s), total_s=total_s)


def rank_state(kept: Kept, generation: int) -> RankState:
    """An image's description in the words of the checkpoint room."""
    told = kept.description
    return RankState(
        rank=told.rank,
        world_size=told.world_size,
        step=told.version.step,
        lineage=told.version.lineage,
        generation=generation,
        identity=told.identity,
        entries=told.entries,
        personal=told.personal,
        shared=told.shared,
        bulk_digest=kept.bulk_digest,
        run_id=told.run_id,
        loss=told.loss,
        is_suspect=told.is_suspect,
    )
