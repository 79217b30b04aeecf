"""Loading a durable checkpoint at the start of `main`, before its first boundary is reported.

Decides what each rank takes: its own shard where the checkpoint has the same number of ranks, which
is exact; else the parts of each tensor that this rank holds now, and what all ranks share. Which
checkpoint it is was decided for the whole job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.reader import Checkpoint, load, open_checkpoint
from trainmover.checkpoint.store import open_store
from trainmover.errors import StateMismatch
from trainmover.protocol.messages import Version
from trainmover.protocol.snapshot_image import ImageEntry
from trainmover.state.resharding import resized
from trainmover.state.rng import capture_rng
from trainmover.state.snapshot import image_entries, load_entries
from trainmover.worker.personal import Personal, decode
from trainmover.worker.snapshots import SharedLeaves, decode_shared

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

STALL_S = 60.0


def restore(stepper: Stepper, name: str, target: Version) -> None:
    """Stand at `target`, with the state of checkpoint `name`.

    Called on: the main thread of a rank that has just built its objects.
    Raises: CheckpointError, StateMismatch, ConfigError.
    """
    side = stepper.host.snapshots
    assert side is not None
    config = side.keeping.checkpoint
    limits = Limits(stall_s=min(STALL_S, config.load_timeout_s), total_s=config.load_timeout_s)

    def work(watch: Watch) -> tuple[Personal, bool]:
        checkpoint = open_checkpoint(open_store(config.directory), name, watch=watch)
        if (checkpoint.manifest.step, checkpoint.manifest.lineage) != (target.step, target.lineage):
            raise StateMismatch(
                f"checkpoint {name} is of step {checkpoint.manifest.step}, expected {target.step}"
            )
        is_same_size = checkpoint.manifest.world_size == stepper.world_size
        take = _load if is_same_size else _reshard
        return take(stepper, checkpoint), is_same_size

    personal, is_same_size = load(work, what=f"loading checkpoint {name}", limits=limits)
    stepper.roles.put_own(personal, target, are_names_known=is_same_size)
    stepper.snapshots.begun_at(target.step)
    stepper.host.mark("checkpoint loaded")


def _load(stepper: Stepper, checkpoint: Checkpoint) -> Personal:
    rank, inventory = stepper.rank, stepper.inventory
    state = checkpoint.rank_state(rank)
    if state.identity != inventory.identity:
        raise StateMismatch(
            f"checkpoint {checkpoint.name}: rank {rank} was saved of other objects, shapes or "
            f"shards: identity {state.identity}, here {inventory.identity}"
        )
    shared = decode_shared(state.shared)
    entries = tuple(
        ImageEntry(**{name: getattr(entry, name) for name in ImageEntry.__struct_fields__})
        for entry in state.entries
    )

    def read(entry: ImageEntry, view: memoryview) -> None:
        checkpoint.read_entry(rank, entry.name, view)

    load_entries(inventory, shared.manifest, entries, read)
    _load_smalls(stepper, shared)
    if inventory.bulk_digest() != state.bulk_digest:
        raise StateMismatch(
            f"checkpoint {checkpoint.name}: loaded state of rank {rank} has digest "
            f"{inventory.bulk_digest():016x}, saved was {state.bulk_digest:016x}"
        )
    return decode(state.personal)


def _load_smalls(stepper: Stepper, shared: SharedLeaves) -> None:
    for name, data in shared.smalls:
        stepper.inventory.load_small(name, data)


def _reshard(stepper: Stepper, checkpoint: Checkpoint) -> Personal:
    """Parts of every tensor as this rank holds them; own leaves stay as `main` has built them."""
    inventory, world = stepper.inventory, checkpoint.manifest.world_size
    state = checkpoint.rank_state(min(stepper.rank, world - 1))
    shared, old = decode_shared(state.shared), decode(state.personal)
    if stepper.batches:
        raise StateMismatch(
            f"checkpoint {checkpoint.name} was saved by {world} ranks, this job has "
            f"{stepper.world_size}: where each loader stands can't be carried over. Start with "
            f"{world} ranks, or export the model and begin a new run from it"
        )
    inventory.conform(resized(inventory, shared.manifest))
    entries, _ = image_entries(inventory)

    def read(entry: ImageEntry, view: memoryview) -> None:
        view[:] = checkpoint.assemble(entry.name, entry.global_offset, entry.shape)

    load_entries(inventory, inventory.manifest(), entries, read)
    _load_smalls(stepper, shared)
    own = [name for name, _ in old.smalls]
    if own:
        text = f"{', '.join(own)} differed by rank and begin anew on {stepper.world_size} ranks"
        stepper.logbook.finding("restore", text)
    return Personal(
        owner_rank=stepper.rank,
        version=old.version,
        is_final=True,
        rng=capture_rng(),
        batches=(),
        step_index=old.step_index,
    )
