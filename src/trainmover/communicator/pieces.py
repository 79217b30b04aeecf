"""Messages of a collective: slots, chunks, and the forms of user tensors they move.

Decides how a tensor is cut into messages, equally on both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import torch

from trainmover.communicator.memory import bytes_of, dense, plain
from trainmover.communicator.operation import Fold, Operation
from trainmover.communicator.reductions import Reduction
from trainmover.communicator.schedules import chunks
from trainmover.communicator.settings import CommunicatorConfig

_ROUND_BITS: Final = 20
GATHER_ROUND: Final = 1024
"""First slot round of the second half of an all-reduce."""
RESULT_ROUND: Final = 2048
"""Slot round of what a folded rank gets back."""


def slot(round_: int, chunk: int) -> int:
    return (round_ << _ROUND_BITS) | chunk


def readable(operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
    """Readable one-dimensional form of a user's tensor."""
    solid = dense(tensor)
    operation.keep.append(solid)
    return plain(solid)


def writable(operation: Operation, tensor: torch.Tensor) -> torch.Tensor:
    """Writable one-dimensional form; a stand-in is copied back on completion."""
    solid = dense(tensor)
    operation.keep.append(solid)
    if solid is not tensor:
        operation.stand_ins.append((tensor, solid))
    return plain(solid)


def chosen_of(operation: Operation) -> Reduction:
    assert operation.call.reduction is not None
    return operation.call.reduction


class Pieces:
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
                op.send(peer, slot(round_, index), raw[low * size : high * size])
                index += 1

    def receive(
        self, op: Operation, peer: int, round_: int, tensors: Iterable[torch.Tensor]
    ) -> None:
        index = 0
        for values in tensors:
            raw, size = bytes_of(values), values.itemsize
            for low, high in self.of(values, 0, values.numel()):
                op.receive(peer, slot(round_, index), raw[low * size : high * size])
                index += 1

    def fold(
        self,
        op: Operation,
        peer: int,
        round_: int,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Combine arriving pieces with (own, out) pairs."""
        combine, is_lower = chosen_of(op).combine, peer < op.call.group.rank
        index = 0
        for own, out in pairs:
            for low, high in self.of(own, 0, own.numel()):
                fold = Fold(own[low:high], out[low:high], combine, is_lower)
                op.receive_folded(peer, slot(round_, index), fold)
                index += 1
