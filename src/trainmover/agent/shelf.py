"""What this machine keeps of ranks' states: held snapshots, copies for others, durable shards.

Decides what is told to the controller and which orders are carried out, once each. Moves no byte:
the snapshot plane does, and says what it holds. Orders of checkpoints are idempotent by number: an
order that comes again is answered again, one below the highest number heard of is void.
"""

from __future__ import annotations

from dataclasses import replace

from trainmover.agent.move import Move
from trainmover.agent.state import (
    CheckpointWriteFailed,
    DropSnapshots,
    ManifestDone,
    ShardsDone,
    Shelf,
    ShipBackups,
    SnapshotsChanged,
    WriteManifest,
    WriteShards,
)
from trainmover.protocol.messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    KeepSnapshots,
    PlaceBackups,
    ShardsWritten,
    SnapshotsHeld,
    WriteCheckpoint,
)

REPEATS = 3
"""Heartbeats that say again what is held: no answer confirms it."""
SELDOM = 10
"""Heartbeats between two later ones that do: what was said before may arrive last."""


def _keep(move: Move, shelf: Shelf) -> None:
    move.state = replace(move.state, shelf=shelf)


# --------------------------------------------------------------------------- what is held


def on_changed(move: Move, event: SnapshotsChanged) -> None:
    """The plane holds something else now, or listens elsewhere."""
    held = SnapshotsHeld(
        machine=move.state.machine,
        incarnation=move.state.incarnation,
        host=event.host,
        port=event.port,
        held=event.held,
        level=event.level,
    )
    shelf = move.state.shelf
    if held == shelf.held:
        return
    _keep(move, replace(shelf, held=held, repeats_left=REPEATS))
    move.tell(held)


def introduce(move: Move) -> None:
    """A controller has just welcomed us: what it can't know."""
    shelf = move.state.shelf
    if shelf.held is not None:
        move.tell(shelf.held)
        _keep(move, replace(shelf, repeats_left=REPEATS))
    for answer in (shelf.shards, shelf.manifest, shelf.failure):
        if answer is not None:
            move.tell(answer)


def repeat(move: Move) -> None:
    """A heartbeat is due: say again what may have been lost."""
    shelf = move.state.shelf
    if shelf.held is None:
        return
    left = shelf.repeats_left - 1
    if left >= 0 or left <= -SELDOM:
        move.tell(shelf.held)
        left = max(left, 0)
    _keep(move, replace(shelf, repeats_left=left))


# --------------------------------------------------------------------------- orders


def on_order(
    move: Move, order: PlaceBackups | KeepSnapshots | WriteCheckpoint | CommitCheckpoint
) -> None:
    """An order of the controller."""
    match order:
        case PlaceBackups():
            _on_backups(move, order)
        case KeepSnapshots():
            move.do(DropSnapshots(keep=order))
        case WriteCheckpoint():
            _on_write(move, order)
        case CommitCheckpoint():
            _on_commit(move, order)


def _on_backups(move: Move, order: PlaceBackups) -> None:
    known = move.state.shelf.backups
    if known is not None and order.term == known.term and order.generation < known.generation:
        return
    _keep(move, replace(move.state.shelf, backups=order))
    move.do(ShipBackups(order=order))
    move.because(f"backups of generation {order.generation}")


def _on_write(move: Move, order: WriteCheckpoint) -> None:
    if order.number > move.state.shelf.number:
        _begin(move, order.number)
    shelf = move.state.shelf
    if order.number < shelf.number or shelf.writing:
        return
    answer = shelf.shards or shelf.failure
    if answer is not None:
        move.tell(answer)
        return
    _keep(move, replace(shelf, writing="shards"))
    move.do(WriteShards(order=order))
    move.because(f"write checkpoint {order.number}")


def _on_commit(move: Move, order: CommitCheckpoint) -> None:
    # The agent that commits need not have written shards: its number may be news to it.
    if order.number > move.state.shelf.number:
        _begin(move, order.number)
    shelf = move.state.shelf
    if order.number < shelf.number or shelf.writing:
        return
    answer = shelf.manifest or shelf.failure
    if answer is not None:
        move.tell(answer)
        return
    _keep(move, replace(shelf, writing="manifest"))
    move.do(WriteManifest(order=order))
    move.because(f"commit checkpoint {order.number}")


def _begin(move: Move, number: int) -> None:
    """A newer checkpoint: whatever an older one is still doing here is nobody's business."""
    shelf = move.state.shelf
    fresh = replace(shelf, number=number, writing="", shards=None, manifest=None, failure=None)
    _keep(move, fresh)


# --------------------------------------------------------------------------- what was written


def on_written(move: Move, event: ShardsDone | ManifestDone | CheckpointWriteFailed) -> None:
    """The plane has carried out a write, or could not; of an older number: nobody waits for it."""
    shelf, machine = move.state.shelf, move.state.machine
    if event.number != shelf.number or not shelf.writing:
        return
    match event:
        case ShardsDone(number=number, version=version):
            shards = ShardsWritten(
                machine=machine,
                number=number,
                version=version,
                shards=event.shards,
                seconds=event.seconds,
            )
            _keep(move, replace(shelf, writing="", shards=shards))
            move.tell(shards)
        case ManifestDone(number=number, version=version, name=name):
            manifest = CheckpointCommitted(
                machine=machine, number=number, version=version, name=name, tier=event.tier
            )
            _keep(move, replace(shelf, writing="", manifest=manifest))
            move.tell(manifest)
        case CheckpointWriteFailed(number=number, version=version, reason=reason):
            failure = CheckpointFailed(
                machine=machine, number=number, version=version, reason=reason
            )
            _keep(move, replace(shelf, writing="", failure=failure))
            move.tell(failure)
            move.because(f"checkpoint {number}: {reason}")
