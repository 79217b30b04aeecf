"""`bench straggler`: one machine is slowed by a fifth in mid-run and switched over by command.

Decides how it is slowed (a sleep of a fifth of a step in its forward; a CPU quota) and what the
loss of efficiency is: all time from the first step to the last above the median step of the stretch
before the slow-down. So both the slow steps until somebody acts and the switchover itself count.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file, core_share, held_job
from trainmover.drills.baseline import read_events
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.bench_rebalance import last_times
from trainmover.drills.compare import compare
from trainmover.drills.cpu_quota import CpuQuota
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import MODEL, JobShape
from trainmover.drills.undisturbed import run_undisturbed

RANKS: Final = 4
SLOW: Final = "m1"
SLOW_RANK: Final = 1
SLOW_VARIABLE: Final = "BENCH_SLOW"
HOLD_AT: Final = 20
MEASURED_STEPS: Final = 20
FORMS: Final = ("sleep", "quota")


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerConfig:
    """Size of the benchmark."""

    folder: Path
    steps: int = 200
    slow_from: int = 75
    share: float = 0.2
    acts_after: int = 10
    """Slow steps until somebody gives the command."""
    model: tuple[str, ...] = MODEL
    forms: tuple[str, ...] = FORMS
    limit_s: float = 900.0


def measure(config: StragglerConfig, tell: Callable[[str], None]) -> Samples:
    """One job per form, and the job left alone. Raises ConfigError outside a clone."""
    shape = JobShape(machines=RANKS, steps=config.steps, model=config.model, limit_s=config.limit_s)
    request = held_job.request_of(shape)
    tell("the job left alone")
    reference = run_undisturbed(request, config.folder / "undisturbed")
    runs = []
    for form in config.forms:
        tell(f"{SLOW} slowed by {config.share:.0%} at step {config.slow_from}: {form}")
        folder = config.folder / form
        held = held_job.held(HOLD_AT, folder)
        slow = (SLOW_VARIABLE, f"{SLOW}:{config.slow_from}:{config.share}")
        disturbance = (held, slow) if form == "sleep" else (held,)
        with RunningJob(replace(request, disturbance=disturbance), folder) as job:
            means, rank = _act(config, job, form)
            result = held_job.end(job, form)
            events = read_events(folder)
            incidents = [held_job.incident_sample(i, events, job) for i in result.incidents]
        runs.append(
            {
                "form": form,
                "means": means,
                "slow_rank": rank,
                "incidents": incidents,
                "last": {str(step): time_s for step, time_s in last_times(events).items()},
                "is_identical": compare(result, reference).is_identical,
            }
        )
    return {
        "runs": runs,
        "hold_at": HOLD_AT,
        "slow_from": config.slow_from,
        "share": config.share,
    }


def _act(config: StragglerConfig, job: RunningJob, form: str) -> tuple[str, int]:
    """Slow the machine, then switch it over; by what means it was slowed, and the rank."""
    job.wait_for_step(HOLD_AT - 1, held_job.WAIT_S)
    held_job.wait_until_ready(job, 1)
    held_job.let_go(job)
    pid, _ = job.worker(SLOW_RANK)
    quota: CpuQuota | None = None
    means = "a sleep in its forward"
    if form == "quota":
        used_cores = _used_cores(config, job, pid)
        job.wait_for_step(config.slow_from - 1)
        # Its share of a core decides how fast its part of a step is done.
        cores = used_cores / (1 + config.share)
        quota = CpuQuota(pid, cores, config.share / (1 + config.share))
        means = quota.means
    try:
        job.wait_for_step(config.slow_from + config.acts_after)
        job.switchover((SLOW,))
    finally:
        if quota is not None:
            quota.end()
    job.wait_for_incidents(1, held_job.WAIT_S)
    return means, SLOW_RANK


def _used_cores(config: StragglerConfig, job: RunningJob, pid: int) -> float:
    """Share of a core that the process uses while it trains."""
    first = config.slow_from - MEASURED_STEPS - 2
    job.wait_for_step(first)
    before, start_s = core_share.read(pid), time.monotonic()
    job.wait_for_step(first + MEASURED_STEPS)
    after, end_s = core_share.read(pid), time.monotonic()
    if before is None or after is None:
        return 1.0 / max(1, RANKS // (os.cpu_count() or 1))
    return (after - before).ran_s / (end_s - start_s)


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """Per form: efficiency lost in all, without the command, and in the switchover itself."""
    summary: Summary = {}
    for run in samples["runs"]:
        for name, value in lost(run, samples).items():
            summary[f"{run['form']}_{name}"] = value
    summary["identical"] = all(run["is_identical"] for run in samples["runs"])
    return summary


def lost(run: dict[str, Any], samples: Samples) -> dict[str, float]:
    """Figures of one run, all against its own median step before the slow-down."""
    last = {int(step): time_s for step, time_s in run["last"].items()}
    slow_from, first, end = samples["slow_from"], samples["hold_at"], max(last)
    durations = {step: last[step] - last[step - 1] for step in range(first + 1, end + 1)}
    (resumed,) = [incident["resumed_step"] for incident in run["incidents"]]
    step_s = statistics.median(durations[step] for step in range(first + 1, slow_from))
    slow_s = statistics.median(durations[step] for step in range(slow_from, resumed))
    after_s = statistics.median(durations[step] for step in range(resumed + 1, end + 1))
    wall_s = last[end] - last[first]
    productive_s = (end - first) * step_s
    kept_s = productive_s + (end - slow_from) * max(0.0, slow_s - step_s)
    return {
        "lost_share": 1 - productive_s / wall_s,
        "lost_share_if_kept": 1 - productive_s / kept_s,
        "slow_step_ratio": slow_s / step_s,
        "step_ratio_after": after_s / step_s,
        "downtime_steps": (durations[resumed] - after_s) / step_s,
        "slow_steps": float(resumed - slow_from),
    }


def notes(samples: Samples) -> list[str]:
    """By what means each form slowed the machine."""
    return [f"{run['form']}: {SLOW} was slowed by {run['means']}" for run in samples["runs"]]


BENCHMARK: Final = bench_file.Benchmark(
    name="straggler",
    summarise=summarise,
    targets={"sleep_lost_share": "below sleep_lost_share_if_kept", "identical": "yes"},
    notes=notes,
)
