"""`bench memory`: a planned switchover must not need more memory than training does.

Decides what is compared: for stayers, leaver and joiner, the high-water mark of resident memory
through the switchover and the bytes counted behind it (tensors and our buffers), both over the
training peak of the 20 steps before. A joiner's own peak includes building its model; it is set
against the stayers' training peak.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.bench_recovery import RANKS
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES, MODEL
from trainmover.drills.request import FOLDER_WORD, JobRequest
from trainmover.errors import ConfigError, DrillFailed

LEAVES: Final = "m1"
RESET_AT: Final = 10
WINDOW: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Size of the benchmark."""

    folder: Path
    steps: int = 160
    model: tuple[str, ...] = (*MODEL[:2], "--width", "256", *MODEL[4:])


def measure(config: MemoryConfig, tell: Callable[[str], None]) -> Samples:
    """One job with one planned switchover. Raises ConfigError outside a clone."""
    script = EXAMPLES / "benchmarks" / "memory_job.py"
    if not script.is_file():
        raise ConfigError(f"no {script}: run this benchmark in a clone")
    tell("one job, one planned switchover")
    request = JobRequest(
        script=script,
        arguments=(
            *("--folder", FOLDER_WORD, "--steps", str(config.steps)),
            *("--reset-at", str(RESET_AT), "--workers", "0", *config.model),
        ),
        machines=RANKS,
        standbys=1,
        limit_s=600.0,
    )
    folder = config.folder / "memory"
    with RunningJob(request, folder) as job:
        job.wait_for_standby()
        job.wait_for_step(RESET_AT + WINDOW + 2, 300.0)
        job.switchover((LEAVES,))
        result = job.wait_until_done()
        job.assert_no_leftovers()
    if result.code != 0:
        raise DrillFailed(f"the job ended with {result.code}: {result.output[-400:]}")
    lines = [
        json.loads(line)
        for path in sorted(folder.glob("memory-*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return {"lines": lines}


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """Ratios to the training peak: counted bytes, and resident memory."""
    lines = samples["lines"]
    trained = {line["pid"]: line for line in lines if line["moment"] == "trained"}
    if not trained:
        raise ConfigError("the samples have no training peak")
    peak_counted = max(counted(line) for line in trained.values())
    peak_resident = max(line["high_water_bytes"] for line in trained.values())
    summary: Summary = {}
    for name, moment in (("stayer", "switched"), ("leaver", "left"), ("joiner", "joined")):
        found = [line for line in lines if line["moment"] == moment]
        pairs = [(line, trained.get(line["pid"])) for line in found]
        summary[f"{name}_peak_ratio"] = _highest(
            [counted(line) / (counted(own) if own else peak_counted) for line, own in pairs]
        )
        summary[f"rss_{name}_peak_ratio"] = _highest(
            [
                line["high_water_bytes"] / (own["high_water_bytes"] if own else peak_resident)
                for line, own in pairs
            ]
        )
        summary[f"rss_{name}_above_mib"] = _highest(
            [
                (line["high_water_bytes"] - (own["high_water_bytes"] if own else peak_resident))
                / 2**20
                for line, own in pairs
            ]
        )
    return summary


def counted(line: dict[str, Any]) -> int:
    """Tensors and our buffers."""
    return int(line["tensor_bytes"] + line["buffer_bytes"])


def _highest(values: Sequence[float]) -> float | None:
    return max(values) if values else None


BENCHMARK: Final = bench_file.Benchmark(
    name="memory",
    summarise=summarise,
    targets={
        "stayer_peak_ratio": "at most 1.0",
        "leaver_peak_ratio": "at most 1.0",
        "joiner_peak_ratio": "at most 1.0",
        "rss_stayer_above_mib": "at most max(1 % of the peak, 8 MiB)",
        "rss_leaver_above_mib": "at most max(1 % of the peak, 8 MiB)",
        "rss_joiner_above_mib": "at most max(1 % of the peak, 8 MiB)",
    },
)
