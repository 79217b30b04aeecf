"""The process's side of snapshots: when one is due, its memory, telling the agent, fetching one."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from trainmover.edges.snapshot_client import Fetch, Holder, fetching
from trainmover.errors import StateMismatch
from trainmover.protocol.messages import JobSpec, Plan, SnapshotTaken, Source
from trainmover.topology.keeping import read_keeping
from trainmover.worker.snapshot_cadence import SnapshotCadence
from trainmover.worker.snapshot_slots import SnapshotSlots


class SnapshotSide:
    """One per process; it outlives each entry of `main`."""

    def __init__(self, spec: JobSpec, secret: bytes, limit_s: float) -> None:
        self.keeping = read_keeping(spec.settings)
        self.slots = SnapshotSlots()
        self._secret = secret
        self._limit_s = limit_s
        self._cadence = SnapshotCadence(self.keeping, spec.world_size, time.monotonic())

    def due(self, step: int) -> int:
        """Rank 0: level of the snapshot that version `step` is to be kept with; 0: none."""
        return self._cadence.level(step, time.monotonic())

    def asked(self, step: int, level: int) -> None:
        """All ranks take a snapshot of version `step`, or try to."""
        self._cadence.asked(step, level, time.monotonic())

    def taken(self, taken: SnapshotTaken) -> None:
        """What it cost here."""
        self._cadence.taken(taken)

    def begin(self, step: int) -> None:
        """State of version `step` has just been loaded."""
        self._cadence.begin(step, time.monotonic())

    def open(self, plan: Plan, rank: int) -> AbstractContextManager[Fetch]:
        """The snapshot that `plan` names for `rank`. Raises TransportError, StateMismatch."""
        source = source_of(plan, rank)
        holder = Holder(
            host=source.host, port=source.port, secret=self._secret, limit_s=self._limit_s
        )
        return fetching(holder, rank, plan.target)


def source_of(plan: Plan, rank: int) -> Source:
    """Where the plan has this rank's snapshot. Raises StateMismatch."""
    for source in plan.sources:
        if source.rank == rank and source.kind == "snapshot":
            return source
    raise StateMismatch(f"plan {plan.number} names no snapshot for rank {rank}")
