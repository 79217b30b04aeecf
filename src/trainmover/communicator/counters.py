"""Totals of the data plane since its construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmover.communicator.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Counters:
    """A reading."""

    opened_total: int
    closed_total: int
    messages_sent: int
    bytes_sent: int
    bytes_received: int

    @classmethod
    def of(cls, mesh: Mesh) -> Counters:
        """Read the mesh's totals; under the lock."""
        channels = mesh.channels.values()
        closed = mesh.totals_of_closed
        return cls(
            mesh.opened_total,
            mesh.closed_total,
            closed[2] + sum(channel.out.frames_out for channel in channels),
            closed[1] + sum(channel.out.bytes_out for channel in channels),
            closed[0] + sum(channel.bytes_in for channel in channels),
        )
