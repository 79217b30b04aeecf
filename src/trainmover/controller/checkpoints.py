"""Durable checkpoints of complete snapshots: who writes what when, and when one counts.

Decides the order of writers, retries and when to give up. Nothing here ever stops or delays
training (P1): a checkpoint that fails is told, the earlier ones stay, and the next is due later.

With disks of their own, machines write to these first, all at once, and each commits its part;
then the files are copied to the storage that all reach, so many machines at a time. The two are two
numbers. What can't be written to a disk goes from memory to the storage, as without disks; what
can't be copied stays on the disks, where a restart of the same machines finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

import msgspec

from trainmover.controller import fitting, lookup, shelf
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
    Tier,
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
    due = move.state.kept.due_now
    does_fit = fitting.does_save_fit(move.state, move.now)
    if due is not None and does_fit and due in shelf.complete_versions(move.state):
        # Disks may go with their machines: in a hurry only what all reach counts.
        is_hurried = fitting.is_hurried(move.state, move.now)
        has_disks = bool(kept.keeping.checkpoint.local_directory) and not is_hurried
        _begin(move, due, tier="disk" if has_disks else "durable")


def _begin(move: Move, version: Version, *, tier: Tier, tries: int = 1) -> None:
    """From agents' memory."""
    state = move.state
    number = state.kept.number + 1
    orders = _orders(state, number, version, tier)
    writing = Writing(
        number=number,
        version=version,
        tries=tries,
        orders=orders,
        queue=tuple(sorted(orders, key=lookup.natural_order)),
        is_suspect=shelf.is_suspect(state, version),
        tier=tier,
    )
    _start(move, writing)


def _begin_copy(move: Move, written: Writing, *, tries: int) -> None:
    """From machines' disks, where `written` has put it (or is the copy that has failed)."""
    number = move.state.kept.number + 1
    orders = {
        name: msgspec.structs.replace(
            order,
            term=move.state.term,
            number=number,
            tier="durable",
            copied_from=written.names.get(name, order.copied_from),
        )
        for name, order in written.orders.items()
    }
    writing = Writing(
        number=number,
        version=written.version,
        tries=tries,
        orders=orders,
        queue=tuple(sorted(orders, key=lookup.natural_order)),
        is_suspect=written.is_suspect,
        is_copy=True,
    )
    _start(move, writing)


def _start(move: Move, writing: Writing) -> None:
    number, version = writing.number, writing.version
    move.append(CheckpointBegun(number=number, version=version, tier=writing.tier))
    _keep_writing(move, writing, number=number)
    move.because(f"checkpoint {number} of step {version.step}{_where(writing)}")
    _send_next(move)


def _where(writing: Writing) -> str:
    if writing.tier == "disk":
        return " on machines' disks"
    return ", copied from machines' disks" if writing.is_copy else ""


def _keep_writing(move: Move, writing: Writing | None, *, number: int = 0) -> None:
    kept = move.state.kept
    keep(move, replace(kept, writing=writing, number=max(number, kept.number)))
    shelf.touch(move)  # a copy from disks holds back nothing


def _orders(
    state: State, number: int, version: Version, tier: Tier
) -> Mapping[str, WriteCheckpoint]:
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
            tier=tier,
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
    """As many machines at once as the share allows; the manifest when all are done.

    Each machine's own disk is nobody else's load: there all write at once.
    """
    writing = move.state.kept.writing
    if writing is None:
        return
    config = move.state.kept.keeping.checkpoint
    share = config.parallel_machines_share if writing.tier == "durable" else 1.0
    share = 1.0 if fitting.is_hurried(move.state, move.now) else share
    limit = max(1, ceil(len(writing.orders) * share))
    deadline = move.in_(config.write_timeout_s)
    busy, queue = dict(writing.busy), list(writing.queue)
    while queue and len(busy) < limit:
        name = queue.pop(0)
        busy[name] = deadline
        move.send(name, writing.orders[name])
    writing = replace(writing, busy=busy, queue=tuple(queue))
    if not busy and not queue:
        committers = _committers(writing)
        writing = replace(writing, committers=committers, busy=dict.fromkeys(committers, deadline))
        for name in committers:
            move.send(name, _commit_order(move.state, writing, name))
    _keep_writing(move, writing)


def _committers(writing: Writing) -> tuple[str, ...]:
    """All for their own disks, else the machine that wrote the lowest rank."""
    if writing.tier == "disk":
        return tuple(sorted(writing.orders, key=lookup.natural_order))
    return (_lowest(writing),)


def _lowest(writing: Writing) -> str:
    """The machine that wrote the lowest rank."""
    return min(writing.orders, key=lambda name: writing.orders[name].ranks)


def _commit_order(state: State, writing: Writing, machine: str) -> CommitCheckpoint:
    return CommitCheckpoint(
        term=state.term,
        number=writing.number,
        version=writing.version,
        generation=state.generation,
        world_size=state.spec.world_size,
        shards=tuple(shard for name in sorted(writing.shards) for shard in writing.shards[name]),
        is_suspect=writing.is_suspect,
        tier=writing.tier,
        copied_from=writing.orders[machine].copied_from,
        begun_from=state.kept.begun_from,
        history=state.kept.history,
    )


def unanswered(state: State) -> list[tuple[str, ToAgentMessage]]:
    """Orders whose answers are awaited, to be sent again."""
    writing = state.kept.writing
    if writing is None:
        return []
    if writing.committers:
        return [(name, _commit_order(state, writing, name)) for name in sorted(writing.busy)]
    return [(name, writing.orders[name]) for name in sorted(writing.busy)]


# --------------------------------------------------------------------------- answers


def on_shards(move: Move, body: ShardsWritten) -> None:
    """One machine's part is durable."""
    writing = move.state.kept.writing
    if writing is None or body.number != writing.number or body.machine not in writing.busy:
        return
    if writing.committers:
        return
    busy = _others(writing, body.machine)
    shards = {**writing.shards, body.machine: body.shards}
    _keep_writing(move, replace(writing, busy=busy, shards=shards))
    _send_next(move)


def _others(writing: Writing, machine: str) -> dict[str, Instant]:
    return {name: due for name, due in writing.busy.items() if name != machine}


def on_committed(move: Move, body: CheckpointCommitted) -> None:
    """A manifest is durable; of storage: the checkpoint counts, for every later loss and start."""
    if body.tier == "disk":
        _on_disk(move, body)
        return
    kept = move.state.kept
    writing = kept.writing
    is_current = writing is not None and body.number == writing.number
    is_news = kept.durable is None or kept.durable.number < body.number
    if not is_news or not (is_current or body.number <= kept.number):
        return
    if shelf.is_left(move.state, body.version):
        return  # `advance` gives it up
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
    if is_suspect:
        kept = replace(kept, suspect=body.version)
    keep(move, replace(kept, writing=None if is_current else writing))
    shelf.touch(move)  # what it held back may go
    move.because(f"checkpoint {body.number} of step {body.version.step} is durable")
    advance(move)


def _on_disk(move: Move, body: CheckpointCommitted) -> None:
    """One machine's part counts on its disk; with the last one the copy begins."""
    writing = move.state.kept.writing
    is_awaited = writing is not None and body.number == writing.number and writing.committers
    if writing is None or not is_awaited or body.machine not in writing.busy:
        return
    names = {**writing.names, body.machine: body.name}
    writing = replace(writing, busy=_others(writing, body.machine), names=names)
    _keep_writing(move, writing)
    if writing.busy:
        return
    number, version, name = writing.number, writing.version, names[_lowest(writing)]
    record = CheckpointKept(
        number=number, version=version, name=name, is_suspect=writing.is_suspect, tier="disk"
    )
    move.append(record)
    kept = replace(move.state.kept, disk_failure="")
    if not writing.is_suspect:
        on_disk = Durable(name=name, version=version, number=number, at=move.now)
        kept = replace(kept, on_disk=on_disk)
    keep(move, kept)
    move.because(f"checkpoint {number} of step {version.step} is on machines' disks")
    _begin_copy(move, writing, tries=1)


def on_failed(move: Move, body: CheckpointFailed) -> None:
    """A machine could not write its part or the manifest."""
    writing = move.state.kept.writing
    if writing is not None and body.number == writing.number:
        _fail(move, writing, f"{body.machine}: {body.reason}")


# --------------------------------------------------------------------------- failures


def _check_writing(move: Move, writing: Writing) -> None:
    """Deadlines, writers that are gone, versions that were left."""
    if shelf.is_left(move.state, writing.version):
        _give_up(move, writing, "the job was rolled back behind it")
        return
    for name in sorted(writing.busy):
        if _is_gone(move.state, name):
            _fail(move, writing, f"{name} is gone")
            return
        if move.now >= writing.busy[name]:
            limit = move.state.kept.keeping.checkpoint.write_timeout_s
            _fail(move, writing, f"{name} has not written its part within {limit:g} s")
            return


def _is_gone(state: State, name: str) -> bool:
    machine = state.machines.get(name)
    return machine is None or machine.is_lost or machine.is_retired


def _fail(move: Move, writing: Writing, reason: str) -> None:
    """Try again under another number, a few times, while the state is still there."""
    is_last = writing.tries + 1 >= move.state.kept.keeping.checkpoint.max_tries
    is_over = writing.tries >= move.state.kept.keeping.checkpoint.max_tries
    is_complete = writing.version in shelf.complete_versions(move.state)
    if writing.tier == "disk" and is_complete:
        # One disk that is full or gone must not cost the checkpoint: the storage may be well.
        _miss(move, writing, reason)
        _begin(move, writing.version, tier="durable")
    elif is_over or (writing.is_copy and _is_newer_due(move.state, writing)):
        _give_up(move, writing, reason)
    elif writing.is_copy and not _has_lost_a_disk(move.state, writing) and not is_last:
        _miss(move, writing, reason)
        _begin_copy(move, writing, tries=writing.tries + 1)
    elif is_complete:
        _miss(move, writing, reason)
        _begin(move, writing.version, tier="durable", tries=writing.tries + 1)
    else:
        _give_up(move, writing, reason)


def _is_newer_due(state: State, writing: Writing) -> bool:
    """Whether a storage that hangs keeps a newer checkpoint from the disks."""
    due = state.kept.due_now
    is_newer = due is not None and due > writing.version
    return is_newer and due in shelf.complete_versions(state)


def _has_lost_a_disk(state: State, writing: Writing) -> bool:
    return any(_is_gone(state, name) for name in writing.orders)


def _give_up(move: Move, writing: Writing, reason: str) -> None:
    _miss(move, writing, reason)
    keep(move, replace(move.state.kept, given_up=writing.version))


def _miss(move: Move, writing: Writing, reason: str) -> None:
    record = CheckpointMissed(
        number=writing.number, version=writing.version, reason=reason, tier=writing.tier
    )
    move.append(record)
    kept = replace(move.state.kept, writing=None, failures=move.state.kept.failures + 1)
    text = f"checkpoint {writing.number} of step {writing.version.step}{_where(writing)}: {reason}"
    is_disk = writing.tier == "disk"
    keep(move, replace(kept, disk_failure=text) if is_disk else replace(kept, failure=text))
    shelf.touch(move)
    move.because(text)


def next_deadline(kept: Kept) -> Instant | None:
    """When a writer is late."""
    return min(kept.writing.busy.values(), default=None) if kept.writing is not None else None
