"""State of one open checkpoint into the objects of a rank that has just built them.

Decides what each rank takes: its own shard where the checkpoint has the same number of ranks, which
is exact; else the parts of each tensor that this rank holds now, what all ranks share, and what
every old rank had of its own. Own leaves are the caller's to put.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainmover.checkpoint.reader import Checkpoint
from trainmover.errors import StateMismatch
from trainmover.protocol.snapshot_image import ImageEntry
from trainmover.state.casting import cast_bytes, check_cast, in_dtypes_of, item_bytes
from trainmover.state.codec import decode_plain
from trainmover.state.inventory import BUFFERS, Inventory
from trainmover.state.resharding import resized
from trainmover.state.snapshot import image_entries, load_entries
from trainmover.worker.personal import Personal, decode
from trainmover.worker.snapshots import decode_shared

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

Smalls = Iterable[tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a checkpoint had for one rank, beside what is in its objects already."""

    personals: tuple[Personal, ...]
    """This rank's own at the same world size, else those of all old ranks."""
    is_same_size: bool
    values: tuple[tuple[str, str], ...]
    """What was logged in front of the checkpoint, and what the validation gave there."""
    casts: tuple[str, ...] = ()


def load_same_size(stepper: Stepper, checkpoint: Checkpoint, *, allows_cast: bool) -> Loaded:
    """This rank's own shard. Raises CheckpointError, StateMismatch."""
    rank, inventory = stepper.rank, stepper.inventory
    state = checkpoint.rank_state(rank)
    shared, personal = decode_shared(state.shared), decode(state.personal)
    manifest, words = in_dtypes_of(inventory, shared.manifest)
    words += _buffer_casts(inventory, (*shared.smalls, *personal.smalls))
    check_cast(words, is_allowed=allows_cast)
    inventory.conform(manifest)  # names the first difference that is more than a dtype
    if state.identity != inventory.identity and not words:
        raise StateMismatch(
            f"checkpoint {checkpoint.name}: rank {rank} was saved of other objects, shapes or "
            f"shards: identity {state.identity}, here {inventory.identity}"
        )
    saved = {entry.name: entry for entry in state.entries}
    entries, _ = image_entries(inventory)

    def read(entry: ImageEntry, view: memoryview) -> None:
        there = saved[entry.name]
        if there.dtype == entry.dtype:
            checkpoint.read_entry(rank, entry.name, view)
            return
        data = memoryview(bytearray(there.size_bytes))
        checkpoint.read_entry(rank, entry.name, data)
        view[:] = cast_bytes(data, there.dtype, entry.dtype)

    load_entries(inventory, inventory.manifest(), entries, read)
    _load_smalls(inventory, shared.smalls)
    if not words and inventory.bulk_digest() != state.bulk_digest:
        raise StateMismatch(
            f"checkpoint {checkpoint.name}: loaded state of rank {rank} has digest "
            f"{inventory.bulk_digest():016x}, saved was {state.bulk_digest:016x}"
        )
    return Loaded(personals=(personal,), is_same_size=True, values=state.loss, casts=tuple(words))


def load_other_size(stepper: Stepper, checkpoint: Checkpoint, *, allows_cast: bool) -> Loaded:
    """Parts of every tensor as this rank holds them. Raises CheckpointError, StateMismatch."""
    inventory, world = stepper.inventory, checkpoint.manifest.world_size
    states = [checkpoint.rank_state(rank) for rank in range(world)]
    personals = tuple(decode(state.personal) for state in states)
    state = states[stepper.rank % world]
    shared = decode_shared(state.shared)
    manifest, words = in_dtypes_of(inventory, shared.manifest)
    words += _buffer_casts(inventory, (*shared.smalls, *personals[stepper.rank % world].smalls))
    check_cast(words, is_allowed=allows_cast)
    inventory.conform(resized(inventory, manifest))
    entries, _ = image_entries(inventory)

    def read(entry: ImageEntry, view: memoryview) -> None:
        data = checkpoint.assemble(entry.name, entry.global_offset, entry.shape)
        there = checkpoint.layout(entry.name).dtype
        if item_bytes(there) * (len(view) // item_bytes(entry.dtype)) != len(data):
            raise StateMismatch(f"{entry.name}: {len(data)} bytes were read, expected {len(view)}")
        view[:] = data if there == entry.dtype else cast_bytes(data, there, entry.dtype)

    load_entries(inventory, inventory.manifest(), entries, read)
    _load_smalls(inventory, shared.smalls)
    values = states[0].loss if stepper.rank == 0 else ()
    return Loaded(personals=personals, is_same_size=False, values=values, casts=tuple(words))


def buffer_dtypes(inventory: Inventory) -> dict[str, torch.dtype]:
    """Of each buffer as it is now."""
    found = {}
    for slot in inventory.buffer_slots():
        tensor = slot.read()
        if tensor is not None:
            found[slot.name] = tensor.dtype
    return found


def cast_buffers(inventory: Inventory, dtypes: dict[str, torch.dtype]) -> None:
    """Bring buffers that were loaded in the dtype they were saved in to the one they had here."""
    for slot in inventory.buffer_slots():
        tensor, wanted = slot.read(), dtypes.get(slot.name)
        if tensor is not None and wanted is not None and tensor.dtype != wanted:
            assert slot.replace is not None
            slot.replace(tensor.to(wanted))


def _buffer_casts(inventory: Inventory, smalls: Smalls) -> list[str]:
    here, words = buffer_dtypes(inventory), []
    for name, data in smalls:
        if name != BUFFERS:
            continue
        for buffer, tensor in decode_plain(data).items():
            if tensor is not None and here.get(buffer, tensor.dtype) != tensor.dtype:
                text = f"{buffer} is {tensor.dtype} there and {here[buffer]} here"
                words.append(text.replace("torch.", ""))
    return words


def _load_smalls(inventory: Inventory, smalls: Smalls) -> None:
    for name, data in smalls:
        inventory.load_small(name, data)
