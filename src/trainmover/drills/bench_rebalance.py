"""`bench rebalance`: one machine moved every N steps, again and again, against save-and-restart.

Decides what is productive: the wall time of the stretch less every gap around a switchover (a gap
is the time between the steps before and after it, less one median step). The restart's figure is
one measured save-and-restart of the same model, put at the same interval. What the moves cost
beside the gaps (a machine that builds itself anew takes cores from those that train) is told apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file, held_job
from trainmover.drills.baseline import BaselineConfig, read_events, run_planned_baseline
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES, MODEL, JobShape
from trainmover.drills.step_times import median_step_s
from trainmover.drills.undisturbed import run_undisturbed

RANKS: Final = 4
START_AT: Final = 10
TEN_MINUTES_S: Final = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RebalanceConfig:
    """Size of the benchmark."""

    folder: Path
    switchovers: int = 20
    interval: int = 30
    """Steps between two moves; more where the standby is not back yet."""
    standbys: int = 1
    """Ready when training begins; more of them, and a move waits less for a machine's return."""
    patience: int = 3
    """How many intervals a move may come after the last one, on average; else there are too few
    steps. A machine that left is back after seconds, however short steps are."""
    model: tuple[str, ...] = MODEL
    baseline_steps: int = 32
    fault_step: int = 26
    limit_s: float = 1500.0

    @property
    def steps(self) -> int:
        """Enough for moves that come later than asked."""
        return START_AT + self.patience * self.interval * (self.switchovers + 1)


def measure(config: RebalanceConfig, tell: Callable[[str], None]) -> Samples:
    """One job, the same undisturbed, one save-and-restart. Raises ConfigError outside a clone."""
    moved = run_moves(config, tell)
    tell("torchrun, save and restart")
    restart = run_planned_baseline(
        BaselineConfig(
            script=EXAMPLES / "baselines" / "torchrun_dcp.py",
            folder=config.folder / "restart",
            script_arguments=config.model,
            ranks=RANKS,
            steps=config.baseline_steps,
            fault_step=config.fault_step,
            limit_s=config.limit_s,
        )
    )
    return moved | {"restart": {name: restart[name] for name in ("downtime_s", "step_s")}}


def run_moves(config: RebalanceConfig, tell: Callable[[str], None]) -> Samples:
    """Our side alone: the job with its moves, and left alone."""
    shape = JobShape(
        machines=RANKS,
        steps=config.steps,
        model=config.model,
        standbys=config.standbys,
        limit_s=config.limit_s,
    )
    request = held_job.request_of(shape)
    tell("the job left alone")
    alone = config.folder / "undisturbed"
    reference = run_undisturbed(request, alone)
    tell(f"{config.switchovers} switchovers, one every {config.interval} steps")
    folder = config.folder / "rebalance"
    with RunningJob(
        replace(request, disturbance=(held_job.held(START_AT, folder),)), folder
    ) as job:
        held_job.wait_until_ready(job, config.standbys)
        held_job.let_go(job)
        job.wait_for_step(START_AT)
        for index in range(config.switchovers):
            _move(job, index, job.last_step() + config.interval)
        result = held_job.end(job, "rebalance")
        events = read_events(folder)
        incidents = [held_job.incident_sample(i, events, job) for i in result.incidents]
    return {
        "interval": config.interval,
        "incidents": incidents,
        "last": {str(step): time_s for step, time_s in last_times(events).items()},
        "undisturbed_step_s": median_step_s(read_events(alone), START_AT),
        "is_identical": compare(result, reference).is_identical,
    }


def _move(job: RunningJob, index: int, step: int) -> None:
    """The machine of a rank leaves, in turn, once the standby is back and `step` is reached."""
    job.wait_for_step(step, held_job.WAIT_S)
    held_job.wait_until_ready(job, 1)
    job.switchover((job.member(index % RANKS).machine,))
    job.wait_for_incidents(index + 1, held_job.WAIT_S)


def last_times(events: Sequence[Any]) -> dict[int, float]:
    """Step -> when the last rank had committed it."""
    found: dict[int, float] = {}
    for event in events:
        if event.name == "step":
            found[event.step] = max(event.time_s, found.get(event.step, event.time_s))
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """ETTR of both, and what else the moves cost."""
    last = {int(step): time_s for step, time_s in samples["last"].items()}
    resumed = [incident["resumed_step"] for incident in samples["incidents"]]
    first, end = START_AT, max(resumed) + samples["interval"]
    end = min(end, max(last))
    steps = range(first + 1, end + 1)
    durations = {step: last[step] - last[step - 1] for step in steps}
    calm = [duration for step, duration in durations.items() if step not in resumed]
    step_s = statistics.median(calm)
    gaps = [max(0.0, durations[step] - step_s) for step in resumed]
    wall_s = last[end] - last[first]
    restart = samples["restart"]
    period_s = samples["interval"] * restart["step_s"]
    downtime_s = statistics.mean(gaps)
    return {
        "ettr": (wall_s - sum(gaps)) / wall_s,
        "ettr_restart": period_s / (period_s + restart["downtime_s"]),
        "ettr_every_10_min": TEN_MINUTES_S / (TEN_MINUTES_S + downtime_s),
        "ettr_restart_every_10_min": TEN_MINUTES_S / (TEN_MINUTES_S + restart["downtime_s"]),
        "identical": samples["is_identical"],
        "switchovers": float(len(resumed)),
        "downtime_s": statistics.median(gaps),
        "downtime_restart_s": restart["downtime_s"],
        "steps_between": (max(resumed) - min(resumed)) / max(1, len(resumed) - 1),
        "slowdown_between": step_s / samples["undisturbed_step_s"],
    }


BENCHMARK: Final = bench_file.Benchmark(
    name="rebalance",
    summarise=summarise,
    targets={"ettr": "far above ettr_restart", "identical": "yes"},
)
