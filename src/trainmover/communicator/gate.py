"""The step gate's frames: a dissemination of flags to everybody, element-wise maximum.

Decides when a gate is complete. Pure: returns what is to be sent; who sends it, and what a gate
means, is decided elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from trainmover.errors import LocalProtocolError
from trainmover.protocol.flags import FINISH
from trainmover.topology.membership import gate_peers

KEPT_STEPS = 64
"""Gates of steps not entered here that are kept; a peer is never further ahead than one."""


class GateSend(NamedTuple):
    """One frame to send."""

    to_rank: int
    step: int
    kind: int
    round: int
    flags: tuple[int, ...]


class GateResult(NamedTuple):
    """A completed gate."""

    step: int
    kind: int
    flags: tuple[int, ...]


class GateMismatch(NamedTuple):
    """A peer's frame contradicts this rank's contribution."""

    step: int
    detail: str


GateOutcome = GateSend | GateResult | GateMismatch


class _Gate:
    __slots__ = ("kind", "flags", "round", "arrived", "is_complete")

    def __init__(self) -> None:
        self.kind: int | None = None
        self.flags: tuple[int, ...] = ()
        self.round = 0
        self.arrived: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.is_complete = False


class Gates:
    """All gates of one generation on one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._peers = gate_peers(rank, world_size)
        self._gates: dict[int, _Gate] = {}
        self._is_closed = False
        self._entered = -1

    def close(self) -> None:
        """Deliver no result any more (freeze, or break)."""
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        """Whether no gate completes any more."""
        return self._is_closed

    def awaited(self) -> tuple[int, int] | None:
        """(step, rank whose frame is missing) of the gate entered last; None where none waits."""
        gate = self._gates.get(self._entered)
        if self._is_closed or gate is None or gate.kind is None:
            return None
        return (self._entered, self._peers[gate.round][1]) if self._peers else None

    def contribute(self, step: int, kind: int, flags: tuple[int, ...]) -> list[GateOutcome]:
        """Enter gate `step`; once per step."""
        gate = self._gates.setdefault(step, _Gate())
        if gate.kind is not None or step <= self._entered:
            raise LocalProtocolError(f"gate {step} was entered twice in one generation")
        self._entered = max(self._entered, step)
        gate.kind, gate.flags = kind, flags
        if self._is_closed:
            return []
        outcomes: list[GateOutcome] = []
        if self._peers:
            outcomes.append(GateSend(self._peers[0][0], step, kind, 0, flags))
        self._advance(step, gate, outcomes)
        return outcomes

    def arrive(
        self, step: int, kind: int, round_: int, flags: tuple[int, ...]
    ) -> list[GateOutcome]:
        """A peer's frame."""
        if self._is_closed or (step <= self._entered and step not in self._gates):
            return []
        gate = self._gates.setdefault(step, _Gate())
        gate.arrived[round_] = (kind, flags)
        if len(self._gates) > KEPT_STEPS:
            del self._gates[min(self._gates)]
        outcomes: list[GateOutcome] = []
        if gate.kind is not None:
            self._advance(step, gate, outcomes)
        return outcomes

    def _advance(self, step: int, gate: _Gate, outcomes: list[GateOutcome]) -> None:
        assert gate.kind is not None
        while gate.round < len(self._peers) and gate.round in gate.arrived:
            kind, flags = gate.arrived.pop(gate.round)
            if kind != gate.kind or len(flags) != len(gate.flags):
                outcomes.append(GateMismatch(step, self._differs(step, gate, kind, flags)))
                return
            gate.flags = tuple(map(max, gate.flags, flags))
            gate.round += 1
            if gate.round < len(self._peers):
                to_rank = self._peers[gate.round][0]
                outcomes.append(GateSend(to_rank, step, gate.kind, gate.round, gate.flags))
        if gate.round == len(self._peers) and not gate.is_complete:
            gate.is_complete = True
            self._gates.pop(step, None)
            outcomes.append(GateResult(step, gate.kind, gate.flags))

    def _differs(self, step: int, gate: _Gate, kind: int, flags: tuple[int, ...]) -> str:
        sender = self._peers[gate.round][1]
        if kind != gate.kind:
            leaver = sender if kind == FINISH else self._rank
            return f"rank {leaver} left the loop at step {step}, others wait in gate {step}"
        return (
            f"rank {sender} entered gate {step} with {len(flags)} flags, this rank with "
            f"{len(gate.flags)}: they track different objects"
        )
