"""Durable checkpoints of complete snapshots: who writes what when, and when one counts.

Decides the order of writers, retries and when to give up. Nothing here ever stops or delays
training (P1): a checkpoint that fails is told, the earlier ones stay, and the next is due later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from trainmover.controller import lookup, shelf
from trainmover.controller.kept import Durable, Kept, Writing
from trainmover.controller.move import Move
from trainmover.controller.shelf import keep
from trainmover.controller.state import State
from trainmover.protocol.journal import CheckpointBegun, CheckpointKept, CheckpointMissed
from trainmover.protocol.messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    ShardsWritten,
    ToAgentMessage,
    Version,
    WriteCheckpoint,
)
from trainmover.units import Instant

# --------------------------------------------------------------------------- course


def advance(move: Move) -> None:
    """Begin what is due; at most one checkpoint is under way."""
    kept = move.state.kept
    if not kept.keeping.checkpoint.is_on:
        return
    if kept.writing is not None:
        _check_writing(move, kept.writing)
        return
    due = due_version(move.state)
    if due is not None and due in shelf.complete_versions(move.state):
        _begin(move, due, tries=1)


def due_version(state: State) -> Version | None:
    """The version that is to be made durable, whether it is complete yet or not."""
    kept = state.kept
    if kept.due is None or kept.is_void(kept.due):
        return None
    is_there = kept.durable is not None and kept.durable.version >= kept.due
    return None if is_there else kept.due


def _begin(move: Move, version: Version, tries: int) -> None:
    state = move.state
    number = state.kept.number + 1
    move.append(CheckpointBegun(number=number, version=version))
    orders = _orders(state, number, version)
    writing = Writing(
        number=number,
        version=version,
        tries=tries,
        orders=orders,
        queue=tuple(sorted(orders, key=lookup.natural_order)),
        is_suspect=shelf.is_suspect(state, version),
    )
    _keep_writing(move, writing, number=number)
    move.because(f"checkpoint {number} of step {version.step}")
    _send_next(move)


def _keep_writing(move: Move, writing: Writing | None, *, number: int = 0) -> None:
    kept = move.state.kept
    keep(move, replace(kept, writing=writing, number=max(number, kept.number)))


def _orders(state: State, number: int, version: Version) -> Mapping[str, WriteCheckpoint]:
    """Which machine writes which ranks; bulk that replicas share is written once."""
    writers, bulk = _writers(state, version)
    orders = {}
    for machine in sorted(set(writers.values()), key=lookup.natural_order):
        ranks = tuple(rank for rank in sorted(writers) if writers[rank] == machine)
        orders[machine] = WriteCheckpoint(
            term=state.term,
            number=number,
            version=version,
            generation=state.generation,
            ranks=ranks,
            bulk_ranks=tuple(rank for rank in ranks if rank in bulk),
        )
    return orders


def _writers(state: State, version: Version) -> tuple[dict[int, str], set[int]]:
    """Machine per rank: its own one if it holds the rank; and the ranks that write their bulk."""
    own: dict[int, str] = {}
    peers: dict[int, str] = {}
    identities: dict[int, str] = {}
    for name, store in shelf.reachable(state).items():
        for held in store.held:
            if held.version == version:
                (own if held.kind == "own" else peers).setdefault(held.rank, name)
                # By value too: ranks of equal names and shapes may hold other values.
                alike = f"{held.identity} {held.bulk_digest:x}"
                identities[held.rank] = alike if held.identity else ""
    writers = {**peers, **own}
    load = dict.fromkeys(writers.values(), 0)
    groups: dict[str, list[int]] = {}
    for rank in sorted(writers):
        groups.setdefault(identities[rank] or f"rank {rank}", []).append(rank)
    bulk: set[int] = set()
    for ranks in groups.values():
        chosen = min(ranks, key=lambda rank: (load[writers[rank]], rank))
        load[writers[chosen]] += 1
        bulk.add(chosen)
    return writers, bulk


def _send_next(move: Move) -> None:
    """As many machines at once as the share allows; the manifest when all are done."""
    writing = move.state.kept.writing
    if writing is None:
        return
    config = move.state.kept.keeping.checkpoint
    limit = max(1, ceil(len(writing.orders) * config.parallel_machines_share))
    deadline = move.in_(config.write_timeout_s)
    busy, queue = dict(writing.busy), list(writing.queue)
    while queue and len(busy) < limit:
        name = queue.pop(0)
        busy[name] = deadline
        move.send(name, writing.orders[name])
    writing = replace(writing, busy=busy, queue=tuple(queue))
    if not busy and not queue:
        writing = replace(
            writing, committer=_committer(writing), busy={_committer(writing): deadline}
        )
        move.send(writing.committer, _commit_order(move.state, writing))
    _keep_writing(move, writing)


def _committer(writing: Writing) -> str:
    """The machine that wrote the lowest rank."""
    return min(writing.orders, key=lambda name: writing.orders[name].ranks)


def _commit_order(state: State, writing: Writing) -> CommitCheckpoint:
    return CommitCheckpoint(
        term=state.term,
        number=writing.number,
        version=writing.version,
        generation=state.generation,
        world_size=state.spec.world_size,
        shards=tuple(shard for name in sorted(writing.shards) for shard in writing.shards[name]),
        is_suspect=writing.is_suspect,
    )


def unanswered(state: State) -> list[tuple[str, ToAgentMessage]]:
    """Orders whose answers are awaited, to be sent again."""
    writing = state.kept.writing
    if writing is None:
        return []
    if writing.committer:
        return [(writing.committer, _commit_order(state, writing))]
    return [(name, writing.orders[name]) for name in sorted(writing.busy)]


# --------------------------------------------------------------------------- answers


def on_shards(move: Move, body: ShardsWritten) -> None:
    """One machine's part is durable."""
    writing = move.state.kept.writing
    if writing is None or body.number != writing.number or body.machine not in writing.busy:
        return
    if writing.committer:
        return
    busy = {name: due for name, due in writing.busy.items() if name != body.machine}
    shards = {**writing.shards, body.machine: body.shards}
    _keep_writing(move, replace(writing, busy=busy, shards=shards))
    _send_next(move)


def on_committed(move: Move, body: CheckpointCommitted) -> None:
    """The manifest is durable: the checkpoint counts, for every later loss and start."""
    kept = move.state.kept
    writing = kept.writing
    is_current = writing is not None and body.number == writing.number
    is_news = kept.durable is None or kept.durable.number < body.number
    if not is_news or not (is_current or body.number <= kept.number) or kept.is_void(body.version):
        return
    is_suspect = writing.is_suspect if writing is not None and is_current else False
    record = CheckpointKept(
        number=body.number, version=body.version, name=body.name, is_suspect=is_suspect
    )
    move.append(record)
    durable = Durable(name=body.name, version=body.version, number=body.number, at=move.now)
    known = kept.durable
    if is_suspect and known is not None:
        durable = replace(known, number=body.number)  # the good one before stays the one to use
    kept = replace(kept, durable=durable, failure="", failures=0)
    if is_suspect and kept.due == body.version:
        kept = replace(kept, due=None)
    keep(move, replace(kept, writing=None if is_current else writing))
    move.because(f"checkpoint {body.number} of step {body.version.step} is durable")
    advance(move)


def on_failed(move: Move, body: CheckpointFailed) -> None:
    """A machine could not write its part or the manifest."""
    writing = move.state.kept.writing
    if writing is not None and body.number == writing.number:
        _fail(move, writing, f"{body.machine}: {body.reason}")


# --------------------------------------------------------------------------- failures


def _check_writing(move: Move, writing: Writing) -> None:
    """Deadlines, writers that are gone, versions that were left."""
    if move.state.kept.is_void(writing.version):
        _give_up(move, writing, "the job was rolled back behind it")
        return
    for name in sorted(writing.busy):
        machine = move.state.machines.get(name)
        if machine is None or machine.is_lost or machine.is_retired:
            _fail(move, writing, f"{name} is gone")
            return
        if move.now >= writing.busy[name]:
            limit = move.state.kept.keeping.checkpoint.write_timeout_s
            _fail(move, writing, f"{name} has not written its part within {limit:g} s")
            return


def _fail(move: Move, writing: Writing, reason: str) -> None:
    """Try again under another number, a few times, while the snapshot is still there."""
    is_complete = writing.version in shelf.complete_versions(move.state)
    if writing.tries >= move.state.kept.keeping.checkpoint.max_tries or not is_complete:
        _give_up(move, writing, reason)
        return
    _miss(move, writing, reason)
    _begin(move, writing.version, tries=writing.tries + 1)


def _give_up(move: Move, writing: Writing, reason: str) -> None:
    _miss(move, writing, reason)
    kept = move.state.kept
    if kept.due == writing.version:
        keep(move, replace(kept, due=None))


def _miss(move: Move, writing: Writing, reason: str) -> None:
    move.append(CheckpointMissed(number=writing.number, version=writing.version, reason=reason))
    kept = move.state.kept
    text = f"checkpoint {writing.number} of step {writing.version.step}: {reason}"
    failed = replace(kept, writing=None, failure=text, failures=kept.failures + 1)
    keep(move, failed)
    move.because(text)


def next_deadline(kept: Kept) -> Instant | None:
    """When a writer is late."""
    return min(kept.writing.busy.values(), default=None) if kept.writing is not None else None
