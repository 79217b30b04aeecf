"""Loading a durable checkpoint at the start of `main`, before its first boundary is reported.

Decides which copy of a checkpoint is read and how long that may take. Which checkpoint it is was
decided for the whole job; what of it goes where is decided in `loading` and, at another world size,
in `another_size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.reader import Checkpoint, load
from trainmover.checkpoint.remote_disk import RemoteDisk
from trainmover.checkpoint.tiers import open_named, open_tiers
from trainmover.edges.disk_client import DiskClient
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

STALL_S = 60.0


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

    others = _other_disks(side, begin)
    stores = open_tiers(config, side.machine, others)

    def work(watch: Watch) -> Loaded:
        failure: CheckpointError | None = None
        for checkpoint in open_named(stores, name, watch=watch):
            try:
                return _take(stepper, checkpoint, target, config.allows_cast)
            except (ShardCorrupt, ShardMissing) as error:
                failure = error  # another tier may have been written by another try
        assert failure is not None, "open_named has raised"
        raise failure

    dtypes, script = buffer_dtypes(stepper.inventory), values_of(stepper.inventory)
    try:
        loaded = load(work, what=f"checkpoint {name}", limits=limits)
    except CheckpointError as error:
        lost = [disk.location for disk in others.values() if disk.is_lost]
        if not lost:
            raise
        # Not the script's fault: the job is led back once it is known who is gone.
        raise DiskLost(f"{', '.join(lost)} gave no answer: {error}") from error
    finally:
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


def _other_disks(side: SnapshotSide, begin: Restore) -> dict[str, RemoteDisk]:
    """Disks of other machines, as tiers; connected to when something is read there."""
    disks = [
        RemoteDisk(
            DiskClient(side.holder(part.host, part.port)),
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
