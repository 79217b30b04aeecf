"""One call of a collective: what the user asked for, independent of how it is answered."""

from __future__ import annotations

import enum
from typing import Any, Final

import torch

from trainmover.communicator.frames import pack_check, unpack_check
from trainmover.communicator.reductions import OP_CODES, Reduction


class Kind(enum.IntEnum):
    """Collectives by meaning; several torch methods share one."""

    ALL_REDUCE = 1
    REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    BROADCAST = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    RECV_ANY = 12


_DTYPES: Final = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
DTYPE_CODES: Final = {dtype: code for code, dtype in enumerate(_DTYPES, start=1)}
_OP_NAMES: Final = {code: name for name, code in OP_CODES.items()}

_POINT_TO_POINT: Final = frozenset((Kind.SEND, Kind.RECV, Kind.RECV_ANY))


class GroupPlace:
    """A group as the communicator sees it: its name, members and this rank's place."""

    __slots__ = ("name", "id", "ranks", "rank", "timeout_s")

    def __init__(
        self, name: str, group_id: int, ranks: tuple[int, ...], rank: int, timeout_s: float
    ) -> None:
        self.name = name
        self.id = group_id
        self.ranks = ranks
        self.rank = rank
        self.timeout_s = timeout_s

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Call:
    """Arguments of one collective, with every tensor in one flat order."""

    __slots__ = (
        "kind",
        "group",
        "inputs",
        "outputs",
        "reduction",
        "root",
        "tag",
        "check",
        "result",
        "timeout_s",
        "is_initialised",
        "is_awaited",
        "is_point_to_point",
    )

    def __init__(
        self,
        kind: Kind,
        group: GroupPlace,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        result: Any,
    ) -> None:
        self.kind = kind
        self.group = group
        self.inputs = inputs
        """ALL_TO_ALL, SCATTER (root), REDUCE_SCATTER: one per rank; else one."""
        self.outputs = outputs
        """ALL_GATHER, GATHER (root), ALL_TO_ALL: one per rank; in-place kinds: the inputs."""
        self.reduction: Reduction | None = None
        self.root = 0
        self.tag = 0
        self.check = 0
        self.result = result
        self.timeout_s: float | None = None
        self.is_initialised = True
        """BROADCAST, not root: the buffer holds values of its own, not fresh memory."""
        self.is_awaited = False
        """The caller does nothing else until it is complete, so it may do the sending itself."""
        self.is_point_to_point = kind in _POINT_TO_POINT

    def seal(self, numel: int) -> None:
        """Fix the description that all ranks must agree on."""
        tensors = self.outputs or self.inputs
        dtype = DTYPE_CODES.get(tensors[0].dtype, 0) if tensors else 0
        op = OP_CODES[self.reduction.name] if self.reduction is not None else 0
        kind = Kind.SEND if self.is_point_to_point else self.kind
        if self.is_point_to_point:
            dtype = 0
        self.check = pack_check(kind, dtype, op, numel)


def describe_check(check: int) -> str:
    """A packed call in words."""
    kind, dtype, op, numel = unpack_check(check)
    known = kind in Kind._value2member_map_
    words = [Kind(kind).name.lower() if known else f"kind {kind}"]
    if op:
        words.append(_OP_NAMES.get(op, f"op {op}"))
    size = f"{numel} {'bytes' if kind == Kind.SEND else 'elements'}"
    name = str(_DTYPES[dtype - 1]) if 0 < dtype <= len(_DTYPES) else ""
    return f"{' '.join(words)} of {size}{' of ' + name if name else ''}"
