"""What a job's long-lived processes hold, and whether a series of figures is flat.

Decides which processes are watched (those that live from the first to the last switchover) and what
"flat" means: the slope of block means is zero within its error, or too small to be seen at all.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainmover.drills import victims
from trainmover.drills.harness import RunningJob

MEMORY = "/memfd:trainmover-"
BLOCKS = 10
T_QUANTILE = 5.04
"""Student's t for 8 degrees of freedom, two-sided 99.9 %: ten watched series in one test."""
UNSEEN_SHARE = 0.005
"""A drift over the whole series below this share of its mean is none."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Of one process: what a leak would add to."""

    descriptors: int
    """Without those of snapshots: how many are kept changes with the step."""
    snapshots: int
    threads: int
    connections: int
    resident_bytes: int
    """Without what others share, snapshots above all: those are counted."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """What must come back to the same number, exactly."""
        return self.descriptors, self.threads, self.connections


def holdings(pid: int) -> Holdings:
    """Of a process that lives."""
    process = psutil.Process(pid)
    connected = [
        c for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_ESTABLISHED
    ]
    targets = descriptors(pid)
    snapshots = [target for target in targets if target.startswith(MEMORY)]
    memory = process.memory_info()
    return Holdings(
        descriptors=len(targets) - len(snapshots),
        snapshots=len(snapshots),
        threads=process.num_threads(),
        connections=len(connected),
        resident_bytes=memory.rss - memory.shared,
    )


def descriptors(pid: int) -> list[str]:
    """What each open descriptor is; one that is closed while we look does not count."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return found


def long_lived(job: RunningJob, machines: Sequence[str]) -> dict[str, int]:
    """Name -> pid of all that must outlive every switchover; rank 0 never moves."""
    found = {"command": job.pid, "controller": job.controller_pid(), "rank 0": job.worker(0)[0]}
    for machine in machines:
        recorded = victims.machine_file(job.directory, machine)
        found[f"agent {machine}"] = recorded.agent_pid
        found[f"nursery {machine}"] = recorded.nursery_pid
    return found


@dataclass(frozen=True, slots=True)
class Trend:
    """Change per switchover of one series, with the error of that."""

    name: str
    mean: float
    slope: float
    error: float
    count: int

    @property
    def is_flat(self) -> bool:
        """Whether the slope is zero within its error, or can't be seen."""
        is_unseen = abs(self.slope) * self.count <= UNSEEN_SHARE * abs(self.mean)
        return is_unseen or abs(self.slope) <= T_QUANTILE * self.error

    def sentence(self) -> str:
        """For the test's output."""
        verdict = "flat" if self.is_flat else "NOT FLAT"
        text = f"{self.mean:.6g}, slope {self.slope:+.3g} +- {self.error:.2g} per switchover"
        return f"{self.name}: {text}: {verdict}"


def trend(name: str, values: Sequence[float]) -> Trend:
    """Least squares over the means of `BLOCKS` blocks: neighbours are not independent."""
    size = len(values) // BLOCKS
    means = [statistics.mean(values[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    places = [i * size + (size - 1) / 2 for i in range(BLOCKS)]
    slope, offset = statistics.linear_regression(places, means)
    rest = [mean - (offset + slope * place) for place, mean in zip(places, means, strict=True)]
    middle = statistics.mean(places)
    spread = sum((place - middle) ** 2 for place in places)
    error = (sum(r * r for r in rest) / (BLOCKS - 2) / spread) ** 0.5
    return Trend(name, statistics.mean(values), slope, error, BLOCKS * size)
