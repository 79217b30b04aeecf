"""The collectives as programs: what to send and receive, in which order, and what to compute.

Decides algorithms by size. Every reduction follows the one tree of schedules.py, so the choice
never shows in the numbers. A program yields to wait for what it has asked to receive; sends
never wait. What may be overwritten while it is still being sent follows from causality: a rank
gets data back only in answer to what it has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import torch

from trainmover.communicator.call import Kind
from trainmover.communicator.memory import bytes_of, dense, plain
from trainmover.communicator.operation import Fold, Operation, Program
from trainmover.communicator.reductions import Reduction, arithmetic_view
from trainmover.communicator.schedules import (
    block_halving,
    chunks,
    distances,
    halving,
    power_below,
    tree_place,
)
from trainmover.communicator.settings import CommunicatorConfig

_ROUND_BITS: Final = 20
_GATHER: Final = 1024
"""First slot round of the second half of an all-reduce."""
_RESULT: Final = 2048
"""Slot round of what a folded rank gets back."""


def _slot(round_: int, chunk: int) -> int:
    return (round_ << _ROUND_BITS) | chunk


def _input(operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
    """Readable one-dimensional form of a user's tensor."""
    solid = dense(tensor)
    operation.keep.append(solid)
    return plain(solid)


def _output(operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
    """Writable one-dimensional form; a stand-in is copied back on completion."""
    solid = dense(tensor)
    operation.keep.append(solid)
    if solid is not tensor:
        operation.stand_ins.append((tensor, solid))
    return plain(solid)


def _chosen(operation: Operation) -> Reduction:
    assert operation.call.reduction is not None
    return operation.call.reduction


class _Pieces:
    """Cuts tensors into messages of at most a chunk."""

    def __init__(self, config: CommunicatorConfig) -> None:
        self._bytes = config.chunk_bytes

    def of(self, values: torch.Tensor, low: int, high: int) -> Iterator[tuple[int, int]]:
        return chunks(low, high, max(1, self._bytes // values.itemsize))

    def send(self, op: Operation, peer: int, round_: int, tensors: Iterable[torch.Tensor]) -> None:
        index = 0
        for values in tensors:
            raw, size = bytes_of(values), values.itemsize
            for low, high in self.of(values, 0, values.numel()):
                op.send(peer, _slot(round_, index), raw[low * size : high * size])
                index += 1

    def receive(
        self, op: Operation, peer: int, round_: int, tensors: Iterable[torch.Tensor]
    ) -> None:
        index = 0
        for values in tensors:
            raw, size = bytes_of(values), values.itemsize
            for low, high in self.of(values, 0, values.numel()):
                op.receive(peer, _slot(round_, index), raw[low * size : high * size])
                index += 1

    def fold(
        self,
        op: Operation,
        peer: int,
        round_: int,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Combine arriving pieces with (own, out) pairs."""
        combine, is_lower = _chosen(op).combine, peer < op.call.group.rank
        index = 0
        for own, out in pairs:
            for low, high in self.of(own, 0, own.numel()):
                fold = Fold(own[low:high], out[low:high], combine, is_lower)
                op.receive_folded(peer, _slot(round_, index), fold)
                index += 1


# -- reductions ----------------------------------------------------------------


def all_reduce(op: Operation, config: CommunicatorConfig) -> Program:
    """Every rank gets the reduction, in place."""
    chosen, size = _chosen(op), op.call.group.size
    whole = _output(op, op.call.outputs[0])
    values = arithmetic_view(whole, chosen)
    if chosen.factor is not None:
        op.touch()
        chosen.prescale(values)
    if size == 1:
        chosen.finish(values, 1)
    elif values.nbytes <= config.small_bytes:
        yield from _all_reduce_small(op, values)
    else:
        yield from _all_reduce_large(op, values, _Pieces(config))


def _doubling(op: Operation, values: torch.Tensor) -> Iterator[torch.Tensor | None]:
    """Recursive doubling on a core rank; yields None to wait, at last the sum."""
    chosen, rank, size = _chosen(op), op.call.group.rank, op.call.group.size
    core = power_below(size)
    total = values.clone()  # may still be leaving when the result is written to `values`
    if rank + core < size:
        arrived = torch.empty_like(values)
        op.keep += (arrived, total)
        op.receive(rank + core, _slot(0, 0), bytes_of(arrived))
        yield None
        total = chosen.combine(total, arrived)
    for round_, distance in enumerate(distances(size), start=1):
        partner = rank ^ distance
        arrived = torch.empty_like(values)
        op.keep += (arrived, total)
        op.receive(partner, _slot(round_, 0), bytes_of(arrived))
        op.send(partner, _slot(round_, 0), bytes_of(total))
        yield None
        pair = (total, arrived) if rank < partner else (arrived, total)
        total = chosen.combine(*pair)
    yield total


def _all_reduce_small(op: Operation, values: torch.Tensor) -> Program:
    chosen, rank, size = _chosen(op), op.call.group.rank, op.call.group.size
    core = power_below(size)
    if rank >= core:
        op.send(rank - core, _slot(0, 0), bytes_of(values))
        op.receive(rank - core, _slot(_RESULT, 0), bytes_of(values))
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
        op.send(rank + core, _slot(_RESULT, 0), bytes_of(values))


def _all_reduce_large(op: Operation, values: torch.Tensor, pieces: _Pieces) -> Program:
    chosen, rank, size = _chosen(op), op.call.group.rank, op.call.group.size
    core = power_below(size)
    if rank >= core:
        pieces.send(op, rank - core, 0, [values])
        pieces.receive(op, rank - core, _RESULT, [values])
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
        pieces.receive(op, exchange.partner, _GATHER + round_, [values[slice(*exchange.give)]])
        pieces.send(op, exchange.partner, _GATHER + round_, [values[slice(*exchange.keep)]])
        yield
    if rank + core < size:
        pieces.send(op, rank + core, _RESULT, [values])


def reduce(op: Operation, config: CommunicatorConfig) -> Program:
    """The root gets the reduction, in place; others' tensors stay as they are."""
    chosen, group = _chosen(op), op.call.group
    root, rank, size = op.call.root, group.rank, group.size
    core = power_below(size)
    pieces = _Pieces(config)
    whole = _output(op, op.call.outputs[0])
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
            pieces.receive(op, rank - core, _RESULT, [target])
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
        pieces.send(op, core_root, _GATHER + rank, [values[slice(*mine)]])
        return
    for peer in range(core):
        if peer != rank:
            part = halving(peer, core, values.numel())[-1].keep
            pieces.receive(op, peer, _GATHER + peer, [values[slice(*part)]])
    yield
    if root >= core:
        pieces.send(op, root, _RESULT, [values])
    elif target is not values:
        target.copy_(values)


def reduce_scatter(op: Operation, config: CommunicatorConfig) -> Program:
    """Rank i gets the reduction of everybody's block i; inputs stay as they are."""
    chosen, group = _chosen(op), op.call.group
    rank, size = group.rank, group.size
    core = power_below(size)
    pieces = _Pieces(config)
    blocks = [arithmetic_view(_input(op, block), chosen) for block in op.call.inputs]
    out = arithmetic_view(_output(op, op.call.outputs[0]), chosen)
    if chosen.factor is not None:
        blocks = [block.clone() for block in blocks]
        for block in blocks:
            chosen.prescale(block)
    op.keep += blocks
    if rank >= core:
        pieces.send(op, rank - core, 0, blocks)
        pieces.receive(op, rank - core, _RESULT, [out])
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
        pieces.send(op, rank + core, _RESULT, [current[rank + core]])


# -- movement ------------------------------------------------------------------


def all_gather(op: Operation, config: CommunicatorConfig) -> Program:
    """Every rank gets everybody's tensor."""
    rank, size = op.call.group.rank, op.call.group.size
    core = power_below(size)
    pieces = _Pieces(config)
    own = _input(op, op.call.inputs[0])
    blocks = [_output(op, output) for output in op.call.outputs]
    if own.numel() and blocks[rank].data_ptr() != own.data_ptr():
        op.touch()
        blocks[rank].copy_(own)
    if rank >= core:
        pieces.send(op, rank - core, 0, [blocks[rank]])
        others = [block for index, block in enumerate(blocks) if index != rank]
        pieces.receive(op, rank - core, _RESULT, others)
        yield
        return
    if rank + core < size:
        pieces.receive(op, rank + core, 0, [blocks[rank + core]])
        yield
    for round_, exchange in reversed(list(enumerate(block_halving(rank, size), start=1))):
        pieces.receive(op, exchange.partner, round_, [blocks[i] for i in exchange.give])
        pieces.send(op, exchange.partner, round_, [blocks[i] for i in exchange.keep])
        yield
    if rank + core < size:
        others = [block for index, block in enumerate(blocks) if index != rank + core]
        pieces.send(op, rank + core, _RESULT, others)


def broadcast(op: Operation, config: CommunicatorConfig) -> Program:
    """Every rank gets the root's tensor, in place; chunks travel down the tree one by one."""
    place = tree_place(op.call.group.rank, op.call.root, op.call.group.size)
    values = _output(op, op.call.outputs[0])
    raw = bytes_of(values)

    def forward(index: int, low: int, high: int) -> Callable[[], None]:
        def send() -> None:
            for child in place.children:
                op.send(child, _slot(0, index), raw[low:high])

        return send

    for index, (low, high) in enumerate(chunks(0, len(raw), config.chunk_bytes)):
        step = forward(index, low, high)
        if place.parent is None:
            step()
        else:
            op.receive(place.parent, _slot(0, index), raw[low:high], step)
    yield


def gather(op: Operation, config: CommunicatorConfig) -> Program:
    """The root gets everybody's tensor."""
    rank, root = op.call.group.rank, op.call.root
    pieces = _Pieces(config)
    own = _input(op, op.call.inputs[0])
    if rank != root:
        pieces.send(op, root, 0, [own])
        return
    for peer, output in enumerate(op.call.outputs):
        block = _output(op, output)
        if peer != rank:
            pieces.receive(op, peer, 0, [block])
        elif own.numel():
            block.copy_(own)
    yield


def scatter(op: Operation, config: CommunicatorConfig) -> Program:
    """Rank i gets the root's tensor i."""
    rank, root = op.call.group.rank, op.call.root
    pieces = _Pieces(config)
    out = _output(op, op.call.outputs[0])
    if rank != root:
        pieces.receive(op, root, 0, [out])
        yield
        return
    for peer, block in enumerate(op.call.inputs):
        values = _input(op, block)
        if peer != rank:
            pieces.send(op, peer, 0, [values])
        elif values.numel():
            out.copy_(values)


def all_to_all(op: Operation, config: CommunicatorConfig) -> Program:
    """Rank i's tensor j goes to rank j as its tensor i."""
    rank, size = op.call.group.rank, op.call.group.size
    pieces = _Pieces(config)
    blocks = [_input(op, tensor) for tensor in op.call.inputs]
    outputs = [_output(op, tensor) for tensor in op.call.outputs]
    if blocks[rank].numel():
        outputs[rank].copy_(blocks[rank])
    for offset in range(1, size):
        pieces.receive(op, (rank - offset) % size, 0, [outputs[(rank - offset) % size]])
        pieces.send(op, (rank + offset) % size, 0, [blocks[(rank + offset) % size]])
    yield


def barrier(op: Operation, config: CommunicatorConfig) -> Program:
    """Nobody leaves before everybody has entered."""
    rank, size = op.call.group.rank, op.call.group.size
    core = power_below(size)
    nothing = memoryview(bytearray())
    if rank >= core:
        op.send(rank - core, _slot(0, 0), nothing)
        op.receive(rank - core, _slot(_RESULT, 0), nothing)
        yield
        return
    if rank + core < size:
        op.receive(rank + core, _slot(0, 0), nothing)
        yield
    for round_, distance in enumerate(distances(size), start=1):
        op.receive(rank ^ distance, _slot(round_, 0), nothing)
        op.send(rank ^ distance, _slot(round_, 0), nothing)
        yield
    if rank + core < size:
        op.send(rank + core, _slot(_RESULT, 0), nothing)


def send(op: Operation, config: CommunicatorConfig) -> Program:
    """One tensor to one rank; complete when the tensor may be changed again."""
    _Pieces(config).send(op, op.call.root, 0, [_input(op, op.call.inputs[0])])
    return
    yield


def receive(op: Operation, config: CommunicatorConfig) -> Program:
    """One tensor from one rank."""
    _Pieces(config).receive(op, op.call.root, 0, [_output(op, op.call.outputs[0])])
    yield


def receive_any(op: Operation, config: CommunicatorConfig) -> Program:
    """One tensor from whoever sends first."""
    group, generation = op.call.group, op.generation
    values = _output(op, op.call.outputs[0])
    op.waiting += 1

    def start(rank: int) -> None:
        op.source = rank
        op.sequence = generation.next_received(group.id, op.tag, rank)
        peer = group.ranks.index(rank)
        _Pieces(config).receive(op, peer, 0, [values])
        op.arrived()

    generation.await_any(group.id, op.tag, op, start)
    yield


PROGRAMS: Final[dict[Kind, Callable[[Operation, CommunicatorConfig], Program]]] = {
    Kind.ALL_REDUCE: all_reduce,
    Kind.REDUCE: reduce,
    Kind.REDUCE_SCATTER: reduce_scatter,
    Kind.ALL_GATHER: all_gather,
    Kind.BROADCAST: broadcast,
    Kind.GATHER: gather,
    Kind.SCATTER: scatter,
    Kind.ALL_TO_ALL: all_to_all,
    Kind.BARRIER: barrier,
    Kind.SEND: send,
    Kind.RECV: receive,
    Kind.RECV_ANY: receive_any,
}
