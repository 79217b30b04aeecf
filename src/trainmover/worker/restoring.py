"""Loading a durable checkpoint at the start of `main`, before its first boundary is reported.

Decides which copy of a checkpoint is read and how long that may take. Which checkpoint it is was
decided for the whole job; what of it goes where is decided in `loading` and, at another world size,
in `another_size`.

A load ends with the generation that it is for: once a member is lost, all begin anew, and whoever
would still wait for storage, or for the disk of the lost machine, would hold up everybody.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.reader import Checkpoint, load
from trainmover.checkpoint.remote_disk import RemoteDisk
from trainmover.checkpoint.tiers import open_named, open_tiers
from trainmover.edges.disk_client import DiskClient
from trainmover.edges.errand import Errand
from trainmover.errors import CheckpointError, DiskLost, ShardCorrupt, ShardMissing, StateMismatch
from trainmover.protocol.messages import Version
from trainmover.worker.another_size import taken_over
from trainmover.worker.loading import (
    Loaded,
    buffer_dtypes,
    cast_buffers,
    load_other_size,
    load_same_size,
)
from trainmover.worker.script_values import name_differences, values_of

if TYPE_CHECKING:
    from trainmover.worker.orders import Restore
    from trainmover.worker.snapshot_side import SnapshotSide
    from trainmover.worker.stepper import Stepper

STALL_S: Final = 60.0
SILENCE_S: Final = 20.0
"""Longest wait for a byte of another machine's agent, so that the storage gets its turn in time."""


class Loading:
    """One load under way, which another thread may call off."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.watch = Watch()
        self.errand = Errand(f"checkpoint {name}", min(SILENCE_S, limits.stall_s / 3))

    def end(self) -> None:
        """From any thread: what is loaded is void. Does not block."""
        self.watch.call_off()
        self.errand.end()


def restore(stepper: Stepper, begin: Restore) -> None:
    """Stand at the target, with the state of the checkpoint that is named.

    Called on: the main thread of a rank that has just built its objects.
    Raises: CheckpointError, StateMismatch, ConfigError.
    """
    side = stepper.host.snapshots
    assert side is not None
    name, target = begin.name, begin.target
    config = side.keeping.checkpoint
    limits = Limits(stall_s=min(STALL_S, config.load_timeout_s), total_s=config.load_timeout_s)

    loading = Loading(name, limits)
    others = _other_disks(side, begin, loading.errand)

    def work(watch: Watch) -> Loaded:
        failure: CheckpointError | None = None
        stores = open_tiers(config, side.machine, others)
        for checkpoint in open_named(stores, name, watch=watch):
            try:
                return _take(stepper, checkpoint, target, config.allows_cast)
            except (ShardCorrupt, ShardMissing) as error:
                failure = error  # another tier may have been written by another try
        assert failure is not None, "open_named has raised"
        raise failure

    dtypes, script = buffer_dtypes(stepper.inventory), values_of(stepper.inventory)
    stepper.host.loads(loading)
    try:
        loaded = load(work, what=f"checkpoint {name}", limits=limits, watch=loading.watch)
    except (CheckpointError, StateMismatch) as error:
        if loading.watch.is_called_off:
            # What was loaded so far is void, as is the boundary that `main` now comes to.
            stepper.version, stepper.roles.void_load = target, loading.watch
            return
        lost = [disk.location for disk in others.values() if disk.is_lost]
        if not lost:
            raise
        # Not the script's fault: the job is led back once it is known who is gone.
        raise DiskLost(f"{', '.join(lost)} gave no answer: {error}") from error
    finally:
        stepper.host.loads(None)
        for disk in others.values():
            disk.close()
    personal = loaded.personals[0]
    if not loaded.is_same_size:
        personal = taken_over(stepper, loaded.personals)
    stepper.roles.put_own(personal, target, are_names_known=loaded.is_same_size)
    is_strict = stepper.host.config.is_strict
    difference = name_differences(script, values_of(stepper.inventory), is_strict=is_strict)
    if difference and stepper.rank == 0:
        stepper.logbook.finding("restore", difference)
    if loaded.casts:
        cast_buffers(stepper.inventory, dtypes)
        stepper.logbook.finding("restore", f"cast as asked for: {'; '.join(loaded.casts)}")
    stepper.snapshots.begun_at(target.step)
    is_exact = loaded.is_same_size and not loaded.casts
    stepper.restored.begin(f"checkpoint {name}", loaded.values, is_exact=is_exact)
    stepper.host.mark("checkpoint loaded")


def _other_disks(side: SnapshotSide, begin: Restore, errand: Errand) -> dict[str, RemoteDisk]:
    """Disks of other machines, as tiers; connected to when something is read there."""
    disks = [
        RemoteDisk(
            DiskClient(replace(side.holder(part.host, part.port), limit_s=errand.limit_s), errand),
            part.machine,
            part.folder,
            ranks=part.ranks,
        )
        for part in begin.disks
        if part.port and part.machine != side.machine
    ]
    return {disk.location: disk for disk in disks}


def _take(stepper: Stepper, checkpoint: Checkpoint, target: Version, allows_cast: bool) -> Loaded:
    manifest = checkpoint.manifest
    if (manifest.step, manifest.lineage) != (target.step, target.lineage):
        raise StateMismatch(
            f"checkpoint {checkpoint.name} is of step {manifest.step}, expected {target.step}"
        )
    is_same_size = manifest.world_size == stepper.world_size
    take = load_same_size if is_same_size else load_other_size
    return take(stepper, checkpoint, allows_cast=allows_cast)
