"""`bench recovery`: what a switchover costs, against a restart of the same job in the same run.

Decides what is compared with what. Ours: one job per repetition in which a machine leaves, comes
back as the standby, and another one is killed. Theirs (`baseline`): torchrun with a checkpoint
every 20 steps, killed the same way and started again at once; and save-and-restart for the planned
case. Downtime is read on one stayer's clock, detection included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file, held_job
from trainmover.drills.baseline import (
    BaselineConfig,
    read_events,
    run_planned_baseline,
    run_unplanned_baseline,
)
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES, MODEL
from trainmover.drills.report import summarise as summarise_incident
from trainmover.drills.request import FOLDER_WORD, JobRequest
from trainmover.drills.runner import FINAL_ARGUMENTS
from trainmover.drills.step_times import median_step_s, stayers_downtime_s, step_times
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.errors import ConfigError, DrillFailed

RANKS: Final = 4
LEAVES: Final = "m1"
DIES: Final = "m2"
STEP_LIMIT_S: Final = 0.15
HOLDS_AT: Final = (20, 120)
"""Steps in front of which the job waits for its standby: how long one compiles changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Size of the benchmark."""

    folder: Path
    steps: int = 220
    repetitions: int = 3
    model: tuple[str, ...] = MODEL
    has_compiled: bool = True
    """Also under torch.compile: minutes more, a cold cache compiles for a minute."""
    baseline_steps: int = 32
    fault_step: int = 26


def measure(config: RecoveryConfig, tell: Callable[[str], None]) -> Samples:
    """All runs, theirs and ours in turn; raw samples. Raises ConfigError outside a clone."""
    if not (EXAMPLES / "benchmarks" / "recovery_job.py").is_file():
        raise ConfigError(f"no examples in {EXAMPLES}: run this benchmark in a clone")
    samples: Samples = {"config": _plain(config), "eager": [], "compile": [], "alone": None}
    for index in range(config.repetitions):
        samples["eager"].append(_repetition(config, index, tell, is_compiled=False))
    tell("one rank alone: what a restart takes with a core for it")
    samples["alone"] = run_planned_baseline(_alone(config))
    if config.has_compiled:
        for index in range(config.repetitions):
            samples["compile"].append(_repetition(config, index, tell, is_compiled=True))
    return samples


def _repetition(
    config: RecoveryConfig, index: int, tell: Callable[[str], None], *, is_compiled: bool
) -> dict[str, Any]:
    mode = "compile" if is_compiled else "eager"
    name = f"{mode} {index + 1} of {config.repetitions}"
    tell(f"{name}: ours, one machine leaves, one dies")
    found: dict[str, Any] = {"ours": _ours(config, index, is_compiled=is_compiled)}
    base = replace(_baseline(config, f"{mode}-{index}"), is_compiled=is_compiled)
    tell(f"{name}: torchrun, one machine killed, restart from the last checkpoint")
    unplanned = replace(base, folder=base.folder / "unplanned")
    found["restart_unplanned"] = run_unplanned_baseline(unplanned)
    if is_compiled:
        tell(f"{name}: the same with warm compile caches everywhere")
        warm = replace(base, folder=base.folder / "warm", replaced_cache_is_empty=False)
        found["restart_unplanned_warm"] = run_unplanned_baseline(warm)
    else:
        tell(f"{name}: torchrun, save and restart")
        planned = replace(base, folder=base.folder / "planned")
        found["restart_planned"] = run_planned_baseline(planned)
    return found


def _baseline(config: RecoveryConfig, name: str) -> BaselineConfig:
    return BaselineConfig(
        script=EXAMPLES / "baselines" / "torchrun_dcp.py",
        folder=config.folder / "restart" / name,
        script_arguments=config.model,
        ranks=RANKS,
        steps=config.baseline_steps,
        fault_step=config.fault_step,
        limit_s=600.0,
    )


def _alone(config: RecoveryConfig) -> BaselineConfig:
    base = _baseline(config, "alone")
    return replace(base, ranks=1, agents="single", fault_rank=0)


# ------------------------------------------------------------------------------------------- ours


def request_of(config: RecoveryConfig, *, is_compiled: bool) -> JobRequest:
    """How our side is started."""
    arguments = ("--steps", str(config.steps), *config.model, "--folder", FOLDER_WORD)
    if is_compiled:
        arguments = (*arguments, "--compile", "--cache", str(config.folder / "caches"))
    return JobRequest(
        script=EXAMPLES / "benchmarks" / "recovery_job.py",
        arguments=(*arguments, *FINAL_ARGUMENTS),
        machines=RANKS,
        standbys=1,
        limit_s=900.0 if is_compiled else 400.0,
    )


def _ours(config: RecoveryConfig, index: int, *, is_compiled: bool) -> dict[str, Any]:
    request = request_of(config, is_compiled=is_compiled)
    mode = "compile" if is_compiled else "eager"
    reference = run_undisturbed(request, config.folder / f"undisturbed-{mode}")
    folder = config.folder / f"ours-{mode}-{index}"
    first, second = HOLDS_AT
    disturbed = replace(request, disturbance=(held_job.held(first, folder, second),))
    with RunningJob(disturbed, folder) as job:
        job.wait_for_step(first - 1, held_job.WAIT_S)
        held_job.wait_until_ready(job, 1)
        held_job.let_go(job)
        job.wait_for_step(first + 12)
        job.switchover((LEAVES,))
        job.wait_for_step(second - 1, held_job.WAIT_S)
        job.wait_for(lambda: LEAVES in job.ready_standbys(), "a new standby", held_job.WAIT_S)
        held_job.let_go(job, 1)
        job.wait_for_step(second + 15)
        job.kill_machine(DIES)
        job.wait_for(lambda: "standby" in {i.kind for i in job.incidents()}, "it is back", 90.0)
        result = job.wait_until_done()
        losses = job.losses()
        job.assert_no_leftovers()
    if result.code != 0:
        raise DrillFailed(f"our side ended with {result.code}: {result.output[-400:]}")
    events = read_events(folder)
    return {
        "incidents": [
            {
                "kind": incident.kind,
                "downtime_s": stayers_downtime_s(incident, events),
                "summary": asdict(summarise_incident(incident, losses)),
                "phases": {p.name: p.after_ns / 1e9 for p in incident.phases},
            }
            for incident in result.incidents
        ],
        "step_s": median_step_s(events, config.steps // 10),
        "is_identical": compare(result, reference).is_identical,
        "times": step_times(events),
    }


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """The figures of design section 9; None for what was not measured."""
    eager, compiled = samples["eager"], samples["compile"]
    planned = _downtimes(eager, "planned")
    unplanned = _downtimes(eager, "standby")
    incidents = [i for rep in (*eager, *compiled) for i in rep["ours"]["incidents"]]
    restart_planned = [rep["restart_planned"]["downtime_s"] for rep in eager]
    restart_unplanned = [rep["restart_unplanned"]["downtime_s"] for rep in eager]
    summary: Summary = {
        "planned_downtime_s": statistics.median(planned),
        "planned_ratio_vs_restart": _ratio(restart_planned, planned),
        "unplanned_downtime_s": statistics.median(unplanned),
        "unplanned_ratio_vs_restart": _ratio(restart_unplanned, unplanned),
        "unplanned_compile_ratio_vs_restart": None,
        "steps_lost": float(max(i["summary"]["steps_lost"] for i in incidents)),
        "step_s": statistics.median(rep["ours"]["step_s"] for rep in eager),
        "identical": all(rep["ours"]["is_identical"] for rep in (*eager, *compiled)),
    }
    to_new = [rep["restart_unplanned"]["to_new_s"] for rep in eager]
    summary["unplanned_ratio_vs_restart_to_new"] = _ratio(to_new, unplanned)
    if compiled:
        ours = _downtimes(compiled, "standby")
        cold = [rep["restart_unplanned"]["downtime_s"] for rep in compiled]
        warm = [rep["restart_unplanned_warm"]["downtime_s"] for rep in compiled]
        summary["unplanned_compile_ratio_vs_restart"] = _ratio(cold, ours)
        summary["unplanned_compile_warm_ratio_vs_restart"] = _ratio(warm, ours)
        summary["unplanned_compile_downtime_s"] = statistics.median(ours)
    if samples["alone"] is not None:
        alone_s = samples["alone"]["downtime_s"]
        summary["restart_alone_s"] = alone_s
        summary["planned_ratio_vs_restart_alone"] = alone_s / statistics.median(planned)
        # Low: it saved before it ended, and nothing had to be noticed or done again.
        summary["unplanned_ratio_vs_restart_alone"] = alone_s / statistics.median(unplanned)
    return summary


def _downtimes(repetitions: Sequence[dict[str, Any]], kind: str) -> list[float]:
    return [
        incident["downtime_s"]
        for repetition in repetitions
        for incident in repetition["ours"]["incidents"]
        if incident["kind"] == kind
    ]


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    # A downtime below a tenth of a millisecond is noise around no downtime at all.
    return statistics.median(theirs) / max(statistics.median(ours), 1e-4)


def _plain(config: RecoveryConfig) -> dict[str, Any]:
    return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(config).items()}


BENCHMARK: Final = bench_file.Benchmark(
    name="recovery",
    summarise=summarise,
    targets={
        "planned_downtime_s": "under 0.3",
        "planned_ratio_vs_restart": "at least 50",
        "unplanned_downtime_s": "under 0.5 + one step",
        "unplanned_ratio_vs_restart": "at least 20",
        "unplanned_compile_ratio_vs_restart": "at least 100",
        "steps_lost": "0",
        "step_s": f"at most {STEP_LIMIT_S}, else choose a smaller model",
        "identical": "yes",
    },
)
