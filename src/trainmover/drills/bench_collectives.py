"""`bench collectives`: our CPU communicator against Gloo, in the same processes and rounds.

Decides which cases are run and how they are compared: rounds interleaved, lower quartiles, ratio
ours to theirs. Measuring is done by `python -m trainmover.communicator.bench`, which may import
torch; this module reads its lines.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trainmover.drills import bench_file
from trainmover.drills.bench_file import Samples, Summary, quantile
from trainmover.errors import DrillFailed
from trainmover.units import KIB, MIB

SIZES: Final = (KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LIMIT_S: Final = 900.0
JUDGED_RANKS: Final = (2, 4)
"""More ranks are reported, not judged: they share the cores of one machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesConfig:
    """Size of the benchmark."""

    ranks: tuple[int, ...] = (2, 4, 8)
    sizes: tuple[int, ...] = SIZES
    rounds: int = 9


def measure(config: CollectivesConfig, tell: Callable[[str], None]) -> Samples:
    """Every case. Raises DrillFailed when a run fails."""
    cases: list[dict[str, Any]] = []
    for count in config.ranks:
        for is_local in (True, False):
            where = "on one machine" if is_local else "each on its own machine"
            tell(f"{count} ranks, {where}")
            cases += _run(config, count, is_local=is_local)
    return {"cases": cases}


def _run(config: CollectivesConfig, ranks: int, *, is_local: bool) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "trainmover.communicator.bench"]
    command += ["--ranks", str(ranks), "--rounds", str(config.rounds)]
    command += ["--sizes", ",".join(map(str, config.sizes))]
    command += ["--local"] if is_local else []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise DrillFailed(f"not done after {LIMIT_S:.0f} s: {' '.join(command)}") from error
    if done.returncode != 0:
        end = "\n".join(done.stderr.splitlines()[-8:])
        raise DrillFailed(f"ended with {done.returncode}: {' '.join(command)}\n{end}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise DrillFailed(f"no case came back: {' '.join(command)}")
    return [line | {"ranks": ranks, "is_local": is_local} for line in lines]


# ---------------------------------------------------------------------------------------- summary


def ratio(case: dict[str, Any]) -> float:
    """Ours to Gloo's, lower quartiles of the rounds."""
    return quantile(case["ours_s"], 0.25) / quantile(case["gloo_s"], 0.25)


def summarise(samples: Samples) -> Summary:
    """Worst and median ratio; `local_`: all ranks on one machine, through shared memory."""
    summary: Summary = {}
    for prefix, is_local in (("", False), ("local_", True)):
        judged = [c for c in samples["cases"] if c["is_local"] is is_local]
        ratios = [ratio(c) for c in judged if c["ranks"] in JUDGED_RANKS]
        summary[f"{prefix}worst_ratio_vs_gloo"] = _or_none(max, ratios)
        summary[f"{prefix}median_ratio_vs_gloo"] = _or_none(statistics.median, ratios)
    return summary


def _or_none(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return of(values) if values else None


BENCHMARK: Final = bench_file.Benchmark(
    name="collectives",
    summarise=summarise,
    targets={
        "worst_ratio_vs_gloo": "at most 1.0",
        "local_worst_ratio_vs_gloo": "at most 1.0",
    },
)
