"""`bench restore`: from each tier, the time until the job takes a new step again.

Decides what is timed: from the kill (or the command) to the first step that is recorded behind it,
detection, respawn and loading included, on one clock. State that nobody else holds: FSDP2. The
memory and peer tiers are losses inside a job, disk and durable restarts of a whole job that had
written to machines' own disks and copied to storage: one with the disks as they were, one without
them, as on other machines. These also pay for the start of the job itself, which a job without
checkpoints shows in the same run.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file, victims
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES
from trainmover.drills.request import JobRequest
from trainmover.errors import ConfigError

LIMIT_S: Final = 300.0
FIRST: Final = 10
OFTEN: Final = (("snapshot.cadence", "every 10 steps"), ("checkpoint.cadence", "every 10 steps"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreConfig:
    """Size of the benchmark."""

    folder: Path
    repetitions: int = 3
    width: int = 512
    url: str = ""
    """Storage of the durable tier; empty: a directory."""


def configured(folder: Path, repetitions: int, url: str) -> RestoreConfig:
    """As the command says."""
    return RestoreConfig(folder=folder, repetitions=repetitions, url=url)


def measure(config: RestoreConfig, tell: Callable[[str], None]) -> Samples:
    """All tiers, by turns. Raises ConfigError outside a clone."""
    script = EXAMPLES / "benchmarks" / "sharded_job.py"
    if not script.is_file():
        raise ConfigError(f"no {script}: run this benchmark in a clone")
    request = JobRequest(
        script=script,
        arguments=("--steps", "4000", "--width", str(config.width)),
        machines=2,
        standbys=0,
        settings=OFTEN,
        limit_s=LIMIT_S,
    )
    tiers: dict[str, Callable[[JobRequest, Path], float]] = {
        "memory": _memory,
        "peer": _peer,
        "disk": partial(_restart, url=config.url, keeps_disks=True),
        "durable": partial(_restart, url=config.url, keeps_disks=False),
        "start": _start,
    }
    samples: Samples = {name: [] for name in tiers}
    for index in range(config.repetitions):
        for name, take in tiers.items():
            tell(f"{name}, {index + 1} of {config.repetitions}")
            samples[name].append(take(request, config.folder / f"{name}-{index}"))
    return samples


def _memory(request: JobRequest, folder: Path) -> float:
    """A worker is killed; its machine's agent holds its state, the other's holds its own."""
    with RunningJob(request, folder) as job:
        _wait_for_snapshot(job)
        return _until_step(job, lambda: job.kill_worker(1))


def _peer(request: JobRequest, folder: Path) -> float:
    """A machine is killed; the other machine's agent holds its state, a standby takes over."""
    with RunningJob(replace(request, standbys=1), folder) as job:
        job.wait_for_standby()
        _wait_for_snapshot(job)
        return _until_step(job, lambda: job.kill_machine("m1"))


def _restart(request: JobRequest, folder: Path, *, url: str, keeps_disks: bool) -> float:
    """Everything is killed; the same command is given again."""
    place = f"{url}/{folder.name}" if url else str(folder / "storage")
    disks = folder / "disks"
    kept = replace(request, flags=("--checkpoints", place, "--local-checkpoints", str(disks)))
    with RunningJob(kept, folder / "first") as job:
        job.wait_for(lambda: _status(job, "checkpoint_step") >= FIRST, "a durable checkpoint")
        victims.end_all(job.processes())
    if not keeps_disks:
        shutil.rmtree(disks)
    return _start(kept, folder / "second")


def _start(request: JobRequest, folder: Path) -> float:
    """From the command to the first recorded step."""
    began = time.monotonic()
    with RunningJob(request, folder) as job:
        job.wait_for(job.losses, "a step")
        return time.monotonic() - began


def _wait_for_snapshot(job: RunningJob) -> None:
    job.wait_for(lambda: _status(job, "snapshot_step") >= FIRST, "a complete snapshot")


def _status(job: RunningJob, name: str) -> int:
    return int((job.status() or {}).get(name, -1))


def _until_step(job: RunningJob, strike: Callable[[], object]) -> float:
    """From the stroke to the first step of the next generation."""
    before = max(record.lineage for record in job.losses().values())
    began = time.monotonic()
    strike()
    job.wait_for(lambda: _newest_lineage(job) > before, "a step behind the loss")
    return time.monotonic() - began


def _newest_lineage(job: RunningJob) -> int:
    return max((record.lineage for record in job.losses().values()), default=0)


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """Medians per tier; for restarts also what loading adds to a plain start."""
    tiers = ("memory", "peer", "disk", "durable")
    summary: Summary = {f"{name}_s": _median(samples.get(name, ())) for name in tiers}
    summary["plain_start_s"] = _median(samples["start"])
    return summary


def _median(values: Sequence[Any]) -> float | None:
    return float(statistics.median(values)) if values else None


BENCHMARK: Final = bench_file.Benchmark(
    name="restore",
    summarise=summarise,
    targets={
        "memory_s": "below disk_s",
        "peer_s": "below disk_s",
        "disk_s": "near plain_start_s",
        "durable_s": "near plain_start_s, or --url's storage",
    },
)
