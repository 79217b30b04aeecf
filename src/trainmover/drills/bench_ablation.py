"""`bench ablation`: downtime of a lost machine as trainmover's parts come on one after the other.

Decides the order of parts and what each run lacks: restart from a checkpoint (torchrun); live state
(healthy workers stay, the joiner builds `main` only after the loss and all channels are opened
anew); incremental communicators (channels between stayers are kept); rehearsal. Every run is the
same job on the same machine, killed the same way. docs/benchmarks.md says what can't be separated.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file, held_job
from trainmover.drills.baseline import BaselineConfig, read_events, run_unplanned_baseline
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES, MODEL, JobShape
from trainmover.drills.step_times import median_step_s
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.errors import ConfigError

DIES: Final = "m2"
RANKS_MIN: Final = 3
HOLD_AT: Final = 20
STEPS: Final = 60
UNHURRIED: Final = (
    ("controller.machine_wait_s", "900"),
    ("controller.recording_wait_s", "900"),
    ("controller.joiner_timeout_s", "900"),
    ("worker.controller_timeout_s", "1200"),
)
"""A joiner that compiles after the loss is waited for, however long it takes."""
UNREHEARSED: Final = (
    ("controller.do_standbys_rehearse", "false"),
    ("rehearsal.shares_compile_cache", "false"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One set of parts that are on."""

    name: str
    title: str
    settings: tuple[tuple[str, str], ...] = ()


STAGES: Final = (
    Stage(
        name="live_state",
        title="+ live state",
        settings=(*UNREHEARSED, ("communicator.does_reuse_channels", "false")),
    ),
    Stage(name="incremental", title="+ incremental communicators", settings=UNREHEARSED),
    Stage(name="rehearsed", title="+ rehearsal"),
)
HANDED: Final = Stage(
    name="handed_caches",
    title="incremental, compile caches handed over",
    settings=UNREHEARSED[:1],
)
"""Beside the ladder: what a joiner without rehearsal gains from a stayer's compiled code."""
NAMES: Final = ("restart", *(stage.name for stage in STAGES))
TITLES: Final = {"restart": "restart from checkpoint"} | {
    s.name: s.title for s in (*STAGES, HANDED)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationConfig:
    """Size of the benchmark."""

    folder: Path
    ranks: tuple[int, ...] = (4, 8)
    compile_ranks: tuple[int, ...] = (4,)
    """Ranks of the runs under torch.compile: each process compiles for a minute of one core."""
    repetitions: int = 3
    model: tuple[str, ...] = MODEL
    baseline_steps: int = 32
    fault_step: int = 26
    limit_s: float = 1500.0

    def __post_init__(self) -> None:
        if min((*self.ranks, *self.compile_ranks), default=0) < RANKS_MIN:
            raise ConfigError(f"ablation: expected at least {RANKS_MIN} ranks: {DIES} is lost")


def measure(config: AblationConfig, tell: Callable[[str], None]) -> Samples:
    """All runs; raw samples. Raises ConfigError outside a clone."""
    wanted = [("eager", ranks) for ranks in config.ranks]
    wanted += [("compile", ranks) for ranks in config.compile_ranks]
    runs = [_ladder(config, mode, ranks, tell) for mode, ranks in wanted]
    return {"runs": runs, "model": list(config.model)}


def _ladder(
    config: AblationConfig, mode: str, ranks: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """All stages in turn, again and again: what else the machine does hits all of them."""
    stages = (*STAGES, HANDED) if mode == "compile" else STAGES
    found: dict[str, Any] = {"restart": [], **{stage.name: [] for stage in stages}}
    for index in range(config.repetitions):
        name = f"{mode}, {ranks} ranks, {index + 1} of {config.repetitions}"
        tell(f"{name}: {TITLES['restart']}")
        found["restart"].append(_restart(config, mode, ranks, index))
        for stage in stages:
            tell(f"{name}: {stage.title}")
            shape = shape_of(config, mode, ranks, stage)
            folder = config.folder / f"{stage.name}-{mode}-{ranks}-{index}"
            found[stage.name].append(run_stage(shape, folder, stage))
    return {"mode": mode, "ranks": ranks, "stages": found}


def _restart(config: AblationConfig, mode: str, ranks: int, index: int) -> dict[str, Any]:
    found = run_unplanned_baseline(
        BaselineConfig(
            script=EXAMPLES / "baselines" / "torchrun_dcp.py",
            folder=config.folder / f"restart-{mode}-{ranks}-{index}",
            script_arguments=config.model,
            ranks=ranks,
            steps=config.baseline_steps,
            fault_step=config.fault_step,
            is_compiled=mode == "compile",
            limit_s=config.limit_s,
        )
    )
    return {name: found[name] for name in ("downtime_s", "to_new_s", "redone", "step_s")}


def shape_of(config: AblationConfig, mode: str, ranks: int, stage: Stage) -> JobShape:
    """The job of one stage."""
    return JobShape(
        machines=ranks,
        steps=STEPS,
        model=config.model,
        settings=(*stage.settings, *UNHURRIED),
        caches=config.folder / "caches" if mode == "compile" else None,
        limit_s=config.limit_s,
    )


def run_stage(shape: JobShape, folder: Path, stage: Stage) -> dict[str, Any]:
    """Lose a machine with the parts of `stage`. Raises DrillFailed if the job does not end well."""
    # The settings of a stage change no number: one undisturbed run serves all of them.
    plain = held_job.request_of(replace(shape, settings=()))
    reference = run_undisturbed(plain, folder.parent / f"undisturbed-{folder.name}")
    own = shape
    if shape.caches is not None:
        own = replace(shape, caches=folder / "caches")  # the standby's is empty
    request = replace(held_job.request_of(own), disturbance=(held_job.held(HOLD_AT, folder),))
    with RunningJob(request, folder) as job:
        job.wait_for_step(HOLD_AT - 1, held_job.WAIT_S)
        held_job.wait_until_started(job, 1)
        if stage.name == "rehearsed":
            held_job.wait_until_ready(job, 1)
        held_job.let_go(job)
        job.wait_for_step(HOLD_AT + 12)
        job.kill_machine(DIES)
        job.wait_for_incidents(1, held_job.WAIT_S)
        result = held_job.end(job, stage.title)
        events = read_events(folder)
        (incident,) = [i for i in result.incidents if i.kind == "standby"]
        sample = held_job.incident_sample(incident, events, job)
    return sample | {
        "connect_s": connect_s(sample),
        "opened_by_stayers": sum(r["opened"] for r in sample["roles"] if not r["is_joiner"]),
        "step_s": median_step_s(events, HOLD_AT + 2),
        "is_identical": compare(result, reference).is_identical,
    }


def connect_s(sample: dict[str, Any]) -> float | None:
    """Slowest stayer from the plan to swapped channels."""
    spans = []
    for role in sample["roles"]:
        marks = sample["marks"].get(str(role["rank"]), {})
        if not role["is_joiner"] and "plan_received" in marks and "swapped" in marks:
            spans.append(marks["swapped"] - marks["plan_received"])
    return max(spans, default=None)


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """Medians of each stage; of more than one number of ranks the later ones carry it."""
    summary: Summary = {}
    seen: set[str] = set()
    identical = []
    for run in samples["runs"]:
        before = "compile_" if run["mode"] == "compile" else ""
        after = f"_{run['ranks']}_ranks" if run["mode"] in seen else ""
        seen.add(run["mode"])
        medians = medians_of(run)
        for name, value in medians.items():
            summary[f"{before}{name}_s{after}"] = value
        rehearsed = max(medians["rehearsed"], 1e-4)
        summary[f"{before}ratio_vs_restart{after}"] = medians["restart"] / rehearsed
        summary[f"{before}ratio_vs_unrehearsed{after}"] = medians["incremental"] / rehearsed
        for name in ("live_state", "incremental"):
            spans = [s["connect_s"] for s in run["stages"][name] if s["connect_s"] is not None]
            summary[f"{before}{name}_connect_s{after}"] = (
                statistics.median(spans) if spans else None
            )
        lowers = [medians[b] < medians[a] for a, b in itertools.pairwise(NAMES)]
        summary[f"{before}each_part_lowers{after}"] = all(lowers)
        found = [s for name, kept in run["stages"].items() if name != "restart" for s in kept]
        identical += [s["is_identical"] for s in found]
    summary["identical"] = all(identical)
    return summary


def medians_of(run: dict[str, Any]) -> dict[str, float]:
    """Stage -> median downtime of one number of ranks."""
    return {
        name: statistics.median(sample["downtime_s"] for sample in kept)
        for name, kept in run["stages"].items()
    }


def notes(samples: Samples) -> list[str]:
    """For each part that lowered nothing: where the time is instead."""
    found = []
    for run in samples["runs"]:
        medians = medians_of(run)
        for before, name in itertools.pairwise(NAMES):
            if medians[name] < medians[before]:
                continue
            where = f"{run['mode']}, {run['ranks']} ranks: {TITLES[name]}"
            spread = _spread(run["stages"][before])
            found.append(
                f"{where} does not lower downtime ({medians[before]:.3f} s before, "
                f"{medians[name]:.3f} s with it; runs without it differ by {spread:.3f} s): "
                + _why(run["stages"][before], run["stages"][name])
            )
    return found


def _spread(kept: Sequence[dict[str, Any]]) -> float:
    values: list[float] = [sample["downtime_s"] for sample in kept]
    return max(values) - min(values)


def _why(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    spans = [
        statistics.median(s["connect_s"] for s in kept if s.get("connect_s") is not None)
        for kept in (before, now)
        if any(s.get("connect_s") is not None for s in kept)
    ]
    if len(spans) < 2:
        return "its phases are in the samples"
    return (
        f"stayers are connected {1000 * spans[0]:.0f} ms after the plan without it and "
        f"{1000 * spans[1]:.0f} ms with it; the rest is the joiner's way into main"
    )


def table_rows(samples: Samples) -> list[list[str]]:
    """The one table: a line per stage, a column per mode and number of ranks."""
    heads = ["downtime, s", *(f"{r['mode']}, {r['ranks']} ranks" for r in samples["runs"])]
    rows = [heads]
    for name in (*NAMES, HANDED.name):
        cells = []
        for run in samples["runs"]:
            value = medians_of(run).get(name)
            cells.append("-" if value is None else f"{value:.3f}")
        if set(cells) != {"-"}:
            rows.append([TITLES[name], *cells])
    return rows


BENCHMARK: Final = bench_file.Benchmark(
    name="ablation",
    summarise=summarise,
    targets={
        "each_part_lowers": "yes, else the notes say why not",
        "compile_ratio_vs_restart": "at least 100",
        "compile_ratio_vs_unrehearsed": "at least 10",
        "identical": "yes",
    },
    notes=notes,
    table_rows=table_rows,
)
