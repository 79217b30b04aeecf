"""Own state at another world size: what each rank takes over from what the old ranks had.

Decides that nothing begins anew in silence: generators follow from the old ones, loaders read on so
that each sample is read once, small objects that differed by rank are taken from rank r modulo the
old number. The numbers are no longer those of the uninterrupted run; the log says what was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from trainmover.errors import StateMismatch
from trainmover.state.inventory import BUFFERS
from trainmover.state.rng import capture_rng, continue_rng
from trainmover.worker.personal import Personal

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


def taken_over(stepper: Stepper, olds: Sequence[Personal]) -> Personal:
    """Personal state of this rank, from that of all ranks of the checkpoint.

    Called on: the main thread, with bulk and shared state in place.

    Raises:
        StateMismatch: Something can't be taken over; the message names it and the remedy.
    """
    rank, size, there = stepper.rank, stepper.world_size, len(olds)
    source = olds[rank % there]
    does_go_on = continue_rng([old.rng for old in olds], rank, size)
    notes = [
        "random generators were equal on all ranks and go on"
        if does_go_on
        else "random generators are seeded anew from those of all old ranks"
    ]
    if any(len(old.batches) != len(stepper.batches) for old in olds):
        raise StateMismatch(
            f"the checkpoint has the places of {len(source.batches)} loaders, here are "
            f"{len(stepper.batches)}"
        )
    for index, batches in enumerate(stepper.batches):
        batches.share_out([old.batches[index] for old in olds], rank, size)
    if stepper.batches:
        notes.append("what was left of each loader's epoch is dealt out anew, each sample once")
    names = [name for name, _ in source.smalls]
    if names:
        _check_buffers(stepper, names)
        notes.append(f"rank r took over rank r modulo {there}'s {', '.join(names)}")
    if any(old.metrics for old in olds):
        notes.append("values logged with reduce= that had not been told are dropped")
    text = f"{there} ranks became {size}, so the numbers are no longer those of {there} ranks"
    stepper.logbook.finding("restore", f"{text}: {'; '.join(notes)}")
    return Personal(
        owner_rank=rank,
        version=source.version,
        is_final=True,
        rng=capture_rng(),
        batches=tuple(batches.position() for batches in stepper.batches),
        smalls=source.smalls,
        step_index=source.step_index,
        logged=source.logged if rank == 0 else (),
    )


def _check_buffers(stepper: Stepper, names: Sequence[str]) -> None:
    """A buffer's shard of another size would take the place of this rank's without a word."""
    if BUFFERS not in names:
        return
    for slot in stepper.inventory.buffer_slots():
        if isinstance(slot.read(), DTensor):
            raise StateMismatch(
                f"{slot.name} is a sharded buffer that differs by rank; it can't be cut anew"
            )
