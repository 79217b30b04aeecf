"""The reductions as programs: what to send and receive, in which order, and what to compute.

Decides algorithms by size. Every reduction follows the one tree of schedules.py, so the choice
never shows in the numbers. A program yields to wait for what it has asked to receive; sends
never wait. What may be overwritten while it is still being sent follows from causality: a rank
gets data back only in answer to what it has sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trainmover.communicator.memory import bytes_of
from trainmover.communicator.operation import Operation, Program
from trainmover.communicator.pieces import (
    GATHER_ROUND,
    RESULT_ROUND,
    Pieces,
    chosen_of,
    readable,
    slot,
    writable,
)
from trainmover.communicator.reductions import arithmetic_view
from trainmover.communicator.schedules import block_halving, distances, halving, power_below
from trainmover.communicator.settings import CommunicatorConfig


def all_reduce(op: Operation, config: CommunicatorConfig) -> Program:
    """Every rank gets the reduction, in place."""
    chosen, size = chosen_of(op), op.call.group.size
    whole = writable(op, op.call.outputs[0])
    values = arithmetic_view(whole, chosen)
    if chosen.factor is not None:
        op.touch()
        chosen.prescale(values)
    if size == 1:
        chosen.finish(values, 1)
    elif values.nbytes <= config.small_bytes:
        yield from _all_reduce_small(op, values)
    else:
        yield from _all_reduce_large(op, values, Pieces(config))


def _doubling(op: Operation, values: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Recursive doubling on a core rank; yields None to wait, at last the sum."""
    chosen, rank, size = chosen_of(op), op.call.group.rank, op.call.group.size
    core = power_below(size)
    total = values.clone()  # may still be leaving when the result is written to `values`
    if rank + core < size:
        arrived = torch.empty_like(values)
        op.keep += (arrived, total)
        op.receive(rank + core, slot(0, 0), bytes_of(arrived))
        yield None
        total = chosen.combine(total, arrived)
    for round_, distance in enumerate(distances(size), start=1):
        partner = rank ^ distance
        arrived = torch.empty_like(values)
        op.keep += (arrived, total)
        op.receive(partner, slot(round_, 0), bytes_of(arrived))
        op.send(partner, slot(round_, 0), bytes_of(total))
        yield None
        pair = (total, arrived) if rank < partner else (arrived, total)
        total = chosen.combine(*pair)
    yield total


def _all_reduce_small(op: Operation, values: torch.Tensor) -> Program:
    chosen, rank, size = chosen_of(op), op.call.group.rank, op.call.group.size
    core = power_below(size)
    if rank >= core:
        op.send(rank - core, slot(0, 0), bytes_of(values))
        op.receive(rank - core, slot(RESULT_ROUND, 0), bytes_of(values))
        yield
        return
    op.is_private = op.call.reduction is None or chosen.factor is None
    total: torch.Tensor | None = None
    for total in _doubling(op, values):
        if total is None:
            yield
    assert total is not None
    chosen.finish(total, size)
    values.copy_(total)
    if rank + core < size:
        op.send(rank + core, slot(RESULT_ROUND, 0), bytes_of(values))


def _all_reduce_large(op: Operation, values: torch.Tensor, pieces: Pieces) -> Program:
    chosen, rank, size = chosen_of(op), op.call.group.rank, op.call.group.size
    core = power_below(size)
    if rank >= core:
        pieces.send(op, rank - core, 0, [values])
        pieces.receive(op, rank - core, RESULT_ROUND, [values])
        yield
        return
    if rank + core < size:
        pieces.fold(op, rank + core, 0, [(values, values)])
        yield
    rounds = halving(rank, core, values.numel())
    for round_, exchange in enumerate(rounds, start=1):
        kept = values[slice(*exchange.keep)]
        pieces.fold(op, exchange.partner, round_, [(kept, kept)])
        pieces.send(op, exchange.partner, round_, [values[slice(*exchange.give)]])
        yield
    chosen.finish(values[slice(*rounds[-1].keep)], size)
    for round_, exchange in reversed(list(enumerate(rounds, start=1))):
        pieces.receive(op, exchange.partner, GATHER_ROUND + round_, [values[slice(*exchange.give)]])
        pieces.send(op, exchange.partner, GATHER_ROUND + round_, [values[slice(*exchange.keep)]])
        yield
    if rank + core < size:
        pieces.send(op, rank + core, RESULT_ROUND, [values])


def reduce(op: Operation, config: CommunicatorConfig) -> Program:
    """The root gets the reduction, in place; others' tensors stay as they are."""
    chosen, group = chosen_of(op), op.call.group
    root, rank, size = op.call.root, group.rank, group.size
    core = power_below(size)
    pieces = Pieces(config)
    whole = writable(op, op.call.outputs[0])
    values = arithmetic_view(whole, chosen)
    if rank != root or chosen.factor is not None:
        target, values = values, values.clone()
    else:
        target = values
    op.keep.append(values)
    chosen.prescale(values)
    core_root = root % core if root >= core else root
    if rank >= core:
        pieces.send(op, rank - core, 0, [values])
        if rank == root:
            pieces.receive(op, rank - core, RESULT_ROUND, [target])
            yield
        return
    if rank + core < size:
        pieces.fold(op, rank + core, 0, [(values, values)])
        yield
    rounds = halving(rank, core, values.numel())
    for round_, exchange in enumerate(rounds, start=1):
        kept = values[slice(*exchange.keep)]
        pieces.fold(op, exchange.partner, round_, [(kept, kept)])
        pieces.send(op, exchange.partner, round_, [values[slice(*exchange.give)]])
        yield
    mine = rounds[-1].keep if rounds else (0, values.numel())
    chosen.finish(values[slice(*mine)], size)
    if rank != core_root:
        pieces.send(op, core_root, GATHER_ROUND + rank, [values[slice(*mine)]])
        return
    for peer in range(core):
        if peer != rank:
            part = halving(peer, core, values.numel())[-1].keep
            pieces.receive(op, peer, GATHER_ROUND + peer, [values[slice(*part)]])
    yield
    if root >= core:
        pieces.send(op, root, RESULT_ROUND, [values])
    elif target is not values:
        target.copy_(values)


def reduce_scatter(op: Operation, config: CommunicatorConfig) -> Program:
    """Rank i gets the reduction of everybody's block i; inputs stay as they are."""
    chosen, group = chosen_of(op), op.call.group
    rank, size = group.rank, group.size
    core = power_below(size)
    pieces = Pieces(config)
    blocks = [arithmetic_view(readable(op, block), chosen) for block in op.call.inputs]
    out = arithmetic_view(writable(op, op.call.outputs[0]), chosen)
    if chosen.factor is not None:
        blocks = [block.clone() for block in blocks]
        for block in blocks:
            chosen.prescale(block)
    op.keep += blocks
    if rank >= core:
        pieces.send(op, rank - core, 0, blocks)
        pieces.receive(op, rank - core, RESULT_ROUND, [out])
        yield
        return
    current = dict(enumerate(blocks))
    owned: set[int] = set()

    def folded(peer: int, round_: int, indices: Iterable[int]) -> None:
        pairs = []
        for index in indices:
            own = current[index]
            if index not in owned:  # the user's input: combine into memory of our own
                owned.add(index)
                current[index] = out if index == rank else torch.empty_like(own)
                op.keep.append(current[index])
            pairs.append((own, current[index]))
        pieces.fold(op, peer, round_, pairs)

    if rank + core < size:
        folded(rank + core, 0, range(size))
        yield
    for round_, exchange in enumerate(block_halving(rank, size), start=1):
        pieces.send(op, exchange.partner, round_, [current[index] for index in exchange.give])
        folded(exchange.partner, round_, exchange.keep)
        yield
    if size == 1:
        out.copy_(blocks[0])
    chosen.finish(out, size)
    if rank + core < size:
        chosen.finish(current[rank + core], size)
        pieces.send(op, rank + core, RESULT_ROUND, [current[rank + core]])
