"""What a collective looks like from any rank that plays the same kind of role.

Decides what two ranks of one class have in common: kinds, shapes, group sizes, and whether a peer
comes before or behind; never rank numbers or the names of groups.
"""

from __future__ import annotations

import msgspec
import torch

from trainmover.communicator.call import Call, Kind

SILENT = frozenset((Kind.BARRIER, Kind.SEND))
"""Kinds that give nothing back."""


class CallShape(msgspec.Struct, frozen=True):
    """One collective without its values."""

    kind: str
    op: str
    group: int
    """Number of the group by first use since the first iteration began. Later ones may lack what
    only a first one calls, and would number the rest otherwise."""
    size: int
    """Ranks of the group."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what comes back (of what is sent, where nothing does); -1: depends on the data."""
    dtypes: tuple[str, ...]
    peer: str = ""
    """Point to point: `prev` or `next`, as ranks count."""
    crosses: bool = True
    """Whether the group spans more than one machine."""

    @property
    def is_point_to_point(self) -> bool:
        """Whether the order against other peers means nothing."""
        return self.peer != ""

    def words(self) -> str:
        """For messages."""
        shapes = " ".join(str(list(shape)) for shape in dict.fromkeys(self.shapes))
        dtypes = "/".join(dict.fromkeys(self.dtypes)).replace("torch.", "")
        op = f" {self.op}" if self.op else ""
        where = f" with {self.peer}" if self.peer else f" among {self.size}"
        return f"{self.kind}{op} of {shapes} {dtypes}{where}".replace("  ", " ")


class Describer:
    """Turns the calls of all iterations, from the first one on, into shapes."""

    def __init__(self, workers_per_machine: int) -> None:
        self._workers_per_machine = workers_per_machine
        self._groups: dict[str, int] = {}
        self._crossing: dict[tuple[int, ...], bool] = {}

    def describe(self, call: Call) -> CallShape:
        """The shape of `call`."""
        group = call.group
        number = self._groups.setdefault(group.name, len(self._groups))
        tensors = _meant(call)
        is_dynamic = call.kind is Kind.ALL_TO_ALL
        return CallShape(
            kind=call.kind.name.lower(),
            op="" if call.reduction is None else call.reduction.name,
            group=number,
            size=group.size,
            shapes=tuple(_shape(tensor, is_dynamic) for tensor in tensors),
            dtypes=tuple(str(tensor.dtype) for tensor in tensors),
            peer=_peer(call),
            crosses=self._does_cross(group.ranks),
        )

    def _does_cross(self, ranks: tuple[int, ...]) -> bool:
        known = self._crossing.get(ranks)
        if known is None:
            known = len({rank // self._workers_per_machine for rank in ranks}) > 1
            self._crossing[ranks] = known
        return known


def _meant(call: Call) -> list[torch.Tensor]:
    """Tensors that every member of the group has alike, root or not."""
    if call.kind is Kind.GATHER:
        return call.inputs[:1]
    return call.outputs or call.inputs


def _shape(tensor: torch.Tensor, is_dynamic: bool) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return (-1, *shape[1:]) if is_dynamic and shape else shape


def _peer(call: Call) -> str:
    if call.kind is Kind.RECV_ANY:
        return "any"
    if not call.is_point_to_point:
        return ""
    return "next" if call.root > call.group.rank else "prev"
