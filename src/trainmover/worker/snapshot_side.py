"""The process's side of snapshots: when one is due, its memory, telling the agent, fetching one."""

from __future__ import annotations

import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

from trainmover.edges.errand import Errand
from trainmover.edges.snapshot_client import Fetch, Holder, fetching
from trainmover.errors import StateMismatch
from trainmover.protocol.messages import (
    CadenceChosen,
    CostsMeasured,
    JobSpec,
    Plan,
    SnapshotTaken,
    Source,
    Version,
)
from trainmover.topology.keeping import SnapshotConfig, read_keeping
from trainmover.worker.loss_watch import LossWatch
from trainmover.worker.slot_files import FilePlan, SlotFiles
from trainmover.worker.snapshot_cadence import SnapshotCadence
from trainmover.worker.snapshot_slots import SnapshotSlots


class SnapshotSide:
    """One per process; it outlives each entry of `main`."""

    def __init__(self, machine: str, spec: JobSpec, secret: bytes, limit_s: float) -> None:
        self.machine = machine
        self.keeping = read_keeping(spec.settings)
        self.slots = SnapshotSlots(SlotFiles(_file_plan(self.keeping.snapshot, spec)))
        self._secret = secret
        self._limit_s = limit_s
        self._cadence = SnapshotCadence(self.keeping, spec.world_size, time.monotonic())
        self.loss = LossWatch(self.keeping.snapshot.stuck_loss_steps)

    def due(self, step: int) -> int:
        """Rank 0: level of the snapshot that version `step` is to be kept with; 0: none."""
        self._cadence.loss_is_unstable = self.loss.is_unstable
        return self._cadence.level(step, time.monotonic())

    def learn(self, costs: CostsMeasured) -> None:
        """From any thread: what saves cost and how often the job fails."""
        self._cadence.learn(costs, time.monotonic())

    def news(self, incarnation: str) -> CadenceChosen | None:
        """What the cadence has come to, if it is another than was told last."""
        return self._cadence.news(incarnation, time.monotonic())

    def asked(self, step: int, level: int) -> None:
        """All ranks take a snapshot of version `step`, or try to."""
        self._cadence.asked(step, level, time.monotonic())

    def taken(self, taken: SnapshotTaken) -> None:
        """What it cost here."""
        self._cadence.taken(taken)

    def begin(self, step: int) -> None:
        """State of version `step` has just been loaded."""
        self._cadence.begin(step, time.monotonic())

    def open(self, plan: Plan, rank: int, errand: Errand) -> AbstractContextManager[Fetch]:
        """The snapshot that `plan` names for `rank`. Raises TransportError, StateMismatch."""
        return self.open_source(source_of(plan, rank), plan.target, errand)

    def open_source(
        self, source: Source, version: Version, errand: Errand
    ) -> AbstractContextManager[Fetch]:
        """The snapshot of `version` where `source` has it. Raises TransportError, StateMismatch."""
        return fetching(self.holder(source.host, source.port), source.rank, version, errand)

    def holder(self, host: str, port: int) -> Holder:
        """An agent's data port, as one that may ask there sees it."""
        return Holder(host=host, port=port, secret=self._secret, limit_s=self._limit_s)


def _file_plan(config: SnapshotConfig, spec: JobSpec) -> FilePlan:
    beside_logs = str(Path(spec.log_directory).parent) if spec.log_directory else ""
    return FilePlan(
        reserve_bytes=config.reserve_bytes,
        disk_directory=config.disk_directory or beside_logs or tempfile.gettempdir(),
        disk_timeout_s=config.disk_timeout_s,
    )


def source_of(plan: Plan, rank: int) -> Source:
    """Where the plan has this rank's snapshot. Raises StateMismatch."""
    for source in plan.sources:
        if source.rank == rank and source.kind == "snapshot":
            return source
    raise StateMismatch(f"plan {plan.number} names no snapshot for rank {rank}")
