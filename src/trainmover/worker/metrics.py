"""`step.log(..., reduce=...)`: values of all ranks, reduced in front of the next gate.

A collective behind the gate can't be repeated after a loss; in front of the next gate it can: it
is undone and repeated with the step it rides on. So a reduced value is told one step later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainmover.errors import ScriptError

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

REDUCTIONS = ("mean", "sum", "max", "min")

Entry = tuple[int, str, str, float]
"""Step, reduction, name, value."""


class Metrics:
    """Reduced values waiting for their ride."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._new: list[Entry] = []
        self._waiting: list[Entry] = []
        self._ridden: list[tuple[int, str, str]] = []
        self._has_late = False

    def pending(self, at_gate: bool) -> tuple[Entry, ...]:
        """What rides in front of the next gate: part of the rank's personal state."""
        return tuple(self._new if at_gate else self._waiting)

    def put(self, entries: tuple[Entry, ...]) -> None:
        """Joiner: take over the lost rank's entries."""
        self._waiting = [tuple(entry) for entry in entries]  # type: ignore[misc]
        # What loop-back iterations have recorded was never true.
        self._new = []
        self._ridden = []

    def drop_late(self) -> bool:
        """After a loss: entries logged behind the gate died with the lost rank; all drop them."""
        has_dropped = self._has_late and bool(self._waiting)
        if self._has_late:
            self._waiting = []
        return has_dropped

    def add(self, step: int, reduce: str, values: Mapping[str, Any]) -> None:
        """Remember values of `step`; dropped if it is undone."""
        if reduce not in REDUCTIONS:
            raise ScriptError(
                f"step.log(reduce={reduce!r}): expected one of {', '.join(REDUCTIONS)}"
            )
        self._has_late = self._stepper.phase == "tail"
        for name, value in values.items():
            self._new.append((step, reduce, name, _number(value)))

    def forget(self) -> None:
        """The attempt was undone."""
        self._new = []
        self._ridden = []

    def commit(self) -> None:
        """The attempt was committed: its values ride in front of the next gate."""
        if self._ridden:
            self._tell()
        self._waiting = self._new
        self._new = []

    def ride(self) -> None:
        """In front of the gate: reduce what waits. Collective over all ranks; may be repeated."""
        if not self._waiting or self._stepper.world_size == 1 or not dist.is_initialized():
            self._ridden = [(s, n, float(v).hex()) for s, _, n, v in self._waiting]
            return
        values = torch.tensor([value for *_, value in self._waiting], dtype=torch.float64)
        told = list(values.tolist())
        for kind, op in (
            ("sum", dist.ReduceOp.SUM),
            ("max", dist.ReduceOp.MAX),
            ("min", dist.ReduceOp.MIN),
        ):
            places = [i for i, entry in enumerate(self._waiting) if _base(entry[1]) == kind]
            if not places:
                continue
            part = values[places].contiguous()
            dist.all_reduce(part, op=op)
            for place, value in zip(places, part.tolist(), strict=True):
                is_mean = self._waiting[place][1] == "mean"
                told[place] = value / self._stepper.world_size if is_mean else value
        self._ridden = [
            (step, name, value.hex())
            for (step, _, name, _), value in zip(self._waiting, told, strict=True)
        ]

    def _tell(self) -> None:
        by_step: dict[int, dict[str, str]] = {}
        for step, name, value in self._ridden:
            by_step.setdefault(step, {})[name] = value
        self._ridden = []
        self._stepper.logbook.tell_reduced(by_step)


def _base(reduce: str) -> str:
    return "sum" if reduce == "mean" else reduce


def as_float(text: str) -> float | None:
    """A value as `step.log` tells it; None if it is not a number."""
    try:
        return float.fromhex(text)
    except ValueError:
        return None


def _number(value: Any) -> float:
    detach = getattr(value, "detach", None)
    return float(detach() if callable(detach) else value)
