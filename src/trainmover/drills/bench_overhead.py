"""`bench overhead`: what trainmover costs a job to which nothing happens.

Decides how the figures come from blocks of steps with and without the gate, run in turn by
examples/benchmarks/overhead_job.py: (a) CPU time of both threads, (b) latency with ranks that
sleep, (c) ratio of whole steps. The interval is that of the median of paired ratios, from order
statistics: no assumption about how noise is distributed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES
from trainmover.drills.request import JobRequest
from trainmover.errors import ConfigError, DrillFailed

RANKS: Final = 4
SLEEP_S: Final = 0.1
CONFIDENCE: Final = 0.9
MODEL: Final = ("--layers", "4", "--width", "128", "--sequence", "64", "--batch", "2")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadConfig:
    """Size of the benchmark."""

    folder: Path
    pairs: int = 12
    block: int = 20
    model: tuple[str, ...] = MODEL


def measure(config: OverheadConfig, tell: Callable[[str], None]) -> Samples:
    """Both jobs. Raises ConfigError outside a clone, DrillFailed when a job fails."""
    script = EXAMPLES / "benchmarks" / "overhead_job.py"
    if not script.is_file():
        raise ConfigError(f"no {script}: run this benchmark in a clone")
    tell(f"{RANKS} ranks that sleep {SLEEP_S * 1000:.0f} ms instead of computing")
    sleeping = _run(config, script, ("--sleep", str(SLEEP_S)), "sleeping")
    tell("the demo's model, end to end")
    training = _run(config, script, config.model, "training")
    return {"block": config.block, "sleeping": sleeping, "training": training}


def _run(
    config: OverheadConfig, script: Path, arguments: tuple[str, ...], name: str
) -> list[list[dict[str, Any]]]:
    # One block more: the first one imports, connects, and rebuilds buckets.
    steps = (config.pairs + 1) * config.block + 1
    folder = config.folder / name
    request = JobRequest(
        script=script,
        arguments=(
            *("--folder", str(folder / "blocks"), "--block", str(config.block)),
            *("--steps", str(steps), *arguments),
        ),
        machines=RANKS,
        standbys=0,
        limit_s=900.0,
    )
    (folder / "blocks").mkdir(parents=True)
    with RunningJob(request, folder) as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
    if result.code != 0:
        raise DrillFailed(f"{name}: the job ended with {result.code}: {result.output[-400:]}")
    return [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((folder / "blocks").glob("blocks-*.jsonl"))
    ]


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """CPU milliseconds, latency and ratio of a step with the gate to one without."""
    sleeping, block = samples["sleeping"], samples["block"]
    worker = [_per_step(rank, "worker_cpu_s", block) for rank in sleeping]
    threads = [_per_step(rank, "io_cpu_s", block) for rank in sleeping]
    ratios = paired_ratios(samples["training"])
    low, high = median_interval(ratios, CONFIDENCE)
    return {
        "gate_cpu_ms": 1000 * (statistics.median(worker) + statistics.median(threads)),
        "gate_cpu_worker_ms": 1000 * statistics.median(worker),
        "gate_cpu_io_ms": 1000 * statistics.median(threads),
        "gate_latency_ms": 1000 * latency_s(sleeping),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "step_s": median_step_s(samples["training"], "without"),
    }


def _per_step(blocks: Sequence[dict[str, Any]], name: str, block: int) -> float:
    """CPU seconds per step with the gate, less those without."""
    of: dict[str, list[float]] = {
        kind: [b[name] for b in blocks if b["kind"] == kind] for kind in ("with", "without")
    }
    return (statistics.median(of["with"]) - statistics.median(of["without"])) / block


def latency_s(ranks: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Median step with the gate, less the median step without."""
    return median_step_s(ranks, "with") - median_step_s(ranks, "without")


def median_step_s(ranks: Sequence[Sequence[dict[str, Any]]], kind: str) -> float:
    """Median over all ranks and blocks of one kind."""
    found: list[float] = [
        s for blocks in ranks for b in blocks if b["kind"] == kind for s in b["steps_s"]
    ]
    return statistics.median(found)


def paired_ratios(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    """Per pair of neighbouring blocks: time with the gate over time without; median of ranks."""
    by_pair: dict[int, list[float]] = {}
    for blocks in ranks:
        without = {b["block"]: sum(b["steps_s"]) for b in blocks if b["kind"] == "without"}
        for b in blocks:
            # A block with the gate follows the one without that has the number below its own.
            if b["kind"] == "with" and b["block"] - 1 in without:
                ratio = sum(b["steps_s"]) / without[b["block"] - 1]
                by_pair.setdefault(b["block"], []).append(ratio)
    return [statistics.median(by_pair[index]) for index in sorted(by_pair)]


def median_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Order statistics that enclose the median with at least `confidence`, binomially."""
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - confidence:
            break
        rank += 1
    index = max(0, rank - 1)
    return ordered[index], ordered[count - 1 - index]


BENCHMARK: Final = bench_file.Benchmark(
    name="overhead",
    summarise=summarise,
    targets={
        "gate_cpu_ms": "at most 1",
        "gate_latency_ms": "at most 1",
        "ratio_high": "around or below 1.01",
    },
)
