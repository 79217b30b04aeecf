"""The collectives without arithmetic, as programs (see collectives.py)."""

from __future__ import annotations

from collections.abc import Callable

from trainmover.communicator.memory import bytes_of
from trainmover.communicator.operation import Operation, Program
from trainmover.communicator.pieces import RESULT_ROUND, Pieces, readable, slot, writable
from trainmover.communicator.schedules import (
    block_halving,
    chunks,
    distances,
    power_below,
    tree_place,
)
from trainmover.communicator.settings import CommunicatorConfig


def all_gather(op: Operation, config: CommunicatorConfig) -> Program:
    """Every rank gets everybody's tensor."""
    rank, size = op.call.group.rank, op.call.group.size
    core = power_below(size)
    pieces = Pieces(config)
    own = readable(op, op.call.inputs[0])
    blocks = [writable(op, output) for output in op.call.outputs]
    if own.numel() and blocks[rank].data_ptr() != own.data_ptr():
        op.touch()
        blocks[rank].copy_(own)
    if rank >= core:
        pieces.send(op, rank - core, 0, [blocks[rank]])
        others = [block for index, block in enumerate(blocks) if index != rank]
        pieces.receive(op, rank - core, RESULT_ROUND, others)
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
        pieces.send(op, rank + core, RESULT_ROUND, others)


def broadcast(op: Operation, config: CommunicatorConfig) -> Program:
    """Every rank gets the root's tensor, in place; chunks travel down the tree one by one."""
    place = tree_place(op.call.group.rank, op.call.root, op.call.group.size)
    values = writable(op, op.call.outputs[0])
    raw = bytes_of(values)

    def forward(index: int, low: int, high: int) -> Callable[[], None]:
        def send() -> None:
            for child in place.children:
                op.send(child, slot(0, index), raw[low:high])

        return send

    for index, (low, high) in enumerate(chunks(0, len(raw), config.chunk_bytes)):
        step = forward(index, low, high)
        if place.parent is None:
            step()
        else:
            op.receive(place.parent, slot(0, index), raw[low:high], step)
    yield


def gather(op: Operation, config: CommunicatorConfig) -> Program:
    """The root gets everybody's tensor."""
    rank, root = op.call.group.rank, op.call.root
    pieces = Pieces(config)
    own = readable(op, op.call.inputs[0])
    if rank != root:
        pieces.send(op, root, 0, [own])
        return
    for peer, output in enumerate(op.call.outputs):
        block = writable(op, output)
        if peer != rank:
            pieces.receive(op, peer, 0, [block])
        elif own.numel():
            block.copy_(own)
    yield


def scatter(op: Operation, config: CommunicatorConfig) -> Program:
    """Rank i gets the root's tensor i."""
    rank, root = op.call.group.rank, op.call.root
    pieces = Pieces(config)
    out = writable(op, op.call.outputs[0])
    if rank != root:
        pieces.receive(op, root, 0, [out])
        yield
        return
    for peer, block in enumerate(op.call.inputs):
        values = readable(op, block)
        if peer != rank:
            pieces.send(op, peer, 0, [values])
        elif values.numel():
            out.copy_(values)


def all_to_all(op: Operation, config: CommunicatorConfig) -> Program:
    """Rank i's tensor j goes to rank j as its tensor i."""
    rank, size = op.call.group.rank, op.call.group.size
    pieces = Pieces(config)
    blocks = [readable(op, tensor) for tensor in op.call.inputs]
    outputs = [writable(op, tensor) for tensor in op.call.outputs]
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
        op.send(rank - core, slot(0, 0), nothing)
        op.receive(rank - core, slot(RESULT_ROUND, 0), nothing)
        yield
        return
    if rank + core < size:
        op.receive(rank + core, slot(0, 0), nothing)
        yield
    for round_, distance in enumerate(distances(size), start=1):
        op.receive(rank ^ distance, slot(round_, 0), nothing)
        op.send(rank ^ distance, slot(round_, 0), nothing)
        yield
    if rank + core < size:
        op.send(rank + core, slot(RESULT_ROUND, 0), nothing)


def send(op: Operation, config: CommunicatorConfig) -> Program:
    """One tensor to one rank; complete when the tensor may be changed again."""
    Pieces(config).send(op, op.call.root, 0, [readable(op, op.call.inputs[0])])
    return
    yield


def receive(op: Operation, config: CommunicatorConfig) -> Program:
    """One tensor from one rank."""
    Pieces(config).receive(op, op.call.root, 0, [writable(op, op.call.outputs[0])])
    yield


def receive_any(op: Operation, config: CommunicatorConfig) -> Program:
    """One tensor from whoever sends first."""
    group, generation = op.call.group, op.generation
    values = writable(op, op.call.outputs[0])
    op.waiting += 1

    def start(rank: int) -> None:
        op.source = rank
        op.sequence = generation.next_received(group.id, op.tag, rank)
        peer = group.ranks.index(rank)
        Pieces(config).receive(op, peer, 0, [values])
        op.arrived()

    generation.await_any(group.id, op.tag, op, start)
    yield
