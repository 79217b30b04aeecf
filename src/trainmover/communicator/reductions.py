"""Reduction operators on plain tensors.

Operands are always (lower rank's, higher rank's): both partners of a round then compute the
same bits even where an operator is not bitwise commutative (signed zeros, NaN payloads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from trainmover.errors import ScriptError

Combine = Callable[..., torch.Tensor]

_COMBINE: Final[dict[str, Combine]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
OP_CODES: Final = {name: code for code, name in enumerate(_COMBINE, start=1)}

_SIGNED: Final = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""Stand-ins for dtypes without arithmetic: addition and product wrap alike in both."""


class Reduction(NamedTuple):
    """One operator, ready to use."""

    name: str
    combine: Combine
    factor: float | torch.Tensor | None

    def prescale(self, values: torch.Tensor) -> None:
        """Apply PREMUL_SUM's factor to this rank's contribution, in place."""
        if self.factor is not None:
            values.mul_(self.factor)

    def finish(self, values: torch.Tensor, count: int) -> None:
        """Turn the sum over `count` ranks into AVG's result, in place."""
        if self.name != "AVG" or values.numel() == 0:
            return
        if values.dtype.is_floating_point or values.dtype.is_complex:
            values.div_(count)
        else:
            values.div_(count, rounding_mode="trunc")


def reduction(op: Any) -> Reduction:
    """The operator behind a torch `ReduceOp` (or its enumeration value)."""
    kind = getattr(op, "op", op)
    name = str(getattr(kind, "name", kind)).rpartition(".")[2]
    if name not in _COMBINE:
        raise ScriptError(f"reduce operator {op!r} is not supported; use one of {sorted(_COMBINE)}")
    factor = op.factor if name == "PREMUL_SUM" and isinstance(op, dist.ReduceOp) else None
    return Reduction(name, _COMBINE[name], factor)


def arithmetic_view(values: torch.Tensor, chosen: Reduction) -> torch.Tensor:
    """`values` in a dtype torch can compute with; refuses what has none."""
    signed = _SIGNED.get(values.dtype)
    if signed is not None and chosen.name in ("SUM", "PRODUCT", "BAND", "BOR", "BXOR"):
        return values.view(signed)
    if values.dtype.itemsize == 1 and values.dtype.is_floating_point:
        raise ScriptError(
            f"{values.dtype} can be moved but not reduced; convert to bfloat16 or float32 first"
        )
    return values
