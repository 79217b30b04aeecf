"""`bench snapshot`: what a snapshot costs, tier by tier, against the usual savers in the same run.

Decides what is compared with what. Blocking: the worker's own snapshot code against a plain copy of
as many bytes into touched memory of the same kind, by turns, and against torch's asynchronous
saver. Durable: our writer against one raw file of the same size. Snapshots in peers' memory: whole
jobs that take and ship them against jobs that take none, by turns. Every-step backup: blocks of
steps of one job with it and without, in turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.drills import bench_file
from trainmover.drills.bench_file import Samples, Summary
from trainmover.drills.bench_overhead import (
    CONFIDENCE,
    median_interval,
    median_step_s,
    paired_ratios,
)
from trainmover.drills.harness import RunningJob
from trainmover.drills.held_job import EXAMPLES, MODEL
from trainmover.drills.request import JobRequest
from trainmover.errors import ConfigError, DrillFailed

LIMIT_S: Final = 900.0
WARM_STEPS: Final = 20
CADENCE: Final = "every 50 steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotConfig:
    """Size of the benchmark."""

    folder: Path
    size_mib: int = 384
    rounds: int = 5
    pairs: int = 2
    steps: int = 220
    blocks: int = 22
    """Of the every-step backup, with and without in turn; two more to begin with."""
    block: int = 16
    model: tuple[str, ...] = ("--parallel", "fsdp2")


def measure(config: SnapshotConfig, tell: Callable[[str], None]) -> Samples:
    """One process for the tiers, then pairs of jobs. Raises ConfigError outside a clone."""
    script = EXAMPLES / "benchmarks" / "snapshot_costs.py"
    if not script.is_file():
        raise ConfigError(f"no {script}: run this benchmark in a clone")
    tell(f"one process, {config.size_mib} MiB of state: memory, peer, durable, the usual savers")
    samples: Samples = {"lines": _costs(config, script), "pairs": []}
    for index in range(config.pairs):
        # By turns: what else the machine does in these minutes hits both.
        order = ("with", "without") if index % 2 else ("without", "with")
        pair: dict[str, Any] = {}
        for which in order:
            tell(f"pair {index + 1} of {config.pairs}: a job {which} backups in peers' memory")
            pair[which] = _steps(config, f"{which}-{index}", which == "with")
        samples["pairs"].append(pair)
    tell(f"{config.blocks} blocks of {config.block} steps, backed up one by one and not, in turn")
    samples["backup"] = _blocks(config)
    return samples


def _blocks(config: SnapshotConfig) -> list[list[dict[str, Any]]]:
    """By rank, what each block took."""
    folder = config.folder / "every-step"
    (folder / "blocks").mkdir(parents=True)
    request = JobRequest(
        script=EXAMPLES / "benchmarks" / "backup_job.py",
        arguments=(
            *("--folder", str(folder / "blocks"), "--block", str(config.block)),
            *("--steps", str((config.blocks + 2) * config.block + 1), *config.model),
        ),
        machines=2,
        standbys=0,
        settings=(("snapshot.increments", "auto"), ("snapshot.cadence", "every 1000000 steps")),
        limit_s=LIMIT_S,
    )
    with RunningJob(request, folder) as job:
        result = job.wait_until_done()
    if result.code != 0:
        raise DrillFailed(f"the job ended with {result.code}: {result.output[-400:]}")
    if "not backed up" in result.output:
        raise DrillFailed(f"the job did not back up its steps: {result.output[-400:]}")
    return [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((folder / "blocks").glob("blocks-*.jsonl"))
    ]


def _costs(config: SnapshotConfig, script: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(script), "--folder", str(config.folder / "costs")]
    command += ["--size-mib", str(config.size_mib), "--rounds", str(config.rounds)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise DrillFailed(f"{script.name} ended with {done.returncode}: {done.stderr[-600:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def _steps(config: SnapshotConfig, name: str, has_backups: bool) -> list[float]:
    """When each step behind the warm-up was recorded."""
    request = JobRequest(
        script=EXAMPLES / "train_gpt.py",
        arguments=("--steps", str(config.steps), "--workers", "0", *MODEL),
        machines=2,
        standbys=0,
        settings=(("snapshot.cadence", CADENCE if has_backups else "never"),),
        limit_s=LIMIT_S,
    )
    with RunningJob(request, config.folder / name) as job:
        result = job.wait_until_done()
        times = [record.at_s for step, record in sorted(job.losses().items()) if step > WARM_STEPS]
    if result.code != 0:
        raise DrillFailed(f"the job ended with {result.code}: {result.output[-400:]}")
    return times


# ---------------------------------------------------------------------------------------- summary


def summarise(samples: Samples) -> Summary:
    """Ratios, and seconds per tier for the size measured."""
    lines = samples["lines"]
    memory = [line for line in _of(lines, "memory") if not line["is_first"]]
    first = [line for line in _of(lines, "memory") if line["is_first"]]
    durable, peer = _of(lines, "durable"), _of(lines, "peer")
    blocked_s = statistics.median(line["blocked_s"] for line in memory)
    copy_s = statistics.median(line["copy_s"] for line in memory)
    saver_s = statistics.median(line["blocked_s"] for line in _of(lines, "dcp.async_save"))
    summary: Summary = {
        "blocking_ratio_vs_copy": blocked_s / copy_s,
        "blocking_ratio_vs_dcp_async": blocked_s / saver_s,
        "durable_throughput_ratio_vs_disk": statistics.median(
            line["raw_s"] / line["written_s"] for line in durable
        ),
        "snapshot_step_overhead_ratio": _overhead(samples["pairs"]),
        **_backup(samples["backup"]),
        "state_mib": memory[0]["bytes"] / 2**20,
        "first_blocked_s": first[0]["blocked_s"],
        "memory_blocked_s": blocked_s,
        "memory_total_s": statistics.median(line["kept_s"] for line in memory),
        "peer_total_s": statistics.median(line["given_s"] for line in peer),
        "durable_total_s": statistics.median(line["written_s"] for line in durable),
    }
    for name in ("torch.save", "dcp.save", "dcp.async_save"):
        key = name.replace(".", "_")
        found = _of(lines, name)
        summary[f"{key}_blocked_s"] = statistics.median(line["blocked_s"] for line in found)
        summary[f"{key}_total_s"] = statistics.median(line["total_s"] for line in found)
    return summary


def _backup(ranks: Sequence[Sequence[dict[str, Any]]]) -> Summary:
    """Neighbouring blocks of one job, with the every-step backup over without."""
    ratios = paired_ratios(ranks)
    low, high = median_interval(ratios, CONFIDENCE)
    cpu = {
        kind: statistics.median(
            (b["worker_cpu_s"] + b["io_cpu_s"]) / len(b["steps_s"])
            for blocks in ranks
            for b in blocks
            if b["kind"] == kind
        )
        for kind in ("with", "without")
    }
    return {
        "backup_step_overhead_ratio": statistics.median(ratios),
        "backup_step_overhead_low": low,
        "backup_step_overhead_high": high,
        "backup_cpu_ms": 1000 * (cpu["with"] - cpu["without"]),
        "backup_step_s": median_step_s(ranks, "without"),
    }


def _of(lines: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["what"] == what]


def _overhead(pairs: Sequence[dict[str, list[float]]]) -> float | None:
    """Whole time of the same steps, with backups over without: snapshots hit few steps."""
    ratios = [_span(pair["with"]) / _span(pair["without"]) for pair in pairs]
    return statistics.median(ratios) if ratios else None


def _span(times: Sequence[float]) -> float:
    return times[-1] - times[0]


BENCHMARK: Final = bench_file.Benchmark(
    name="snapshot",
    summarise=summarise,
    targets={
        "blocking_ratio_vs_copy": "at most 1.3",
        "blocking_ratio_vs_dcp_async": "below 1",
        "durable_throughput_ratio_vs_disk": "near 1",
        "snapshot_step_overhead_ratio": "at most 1.05",
        "backup_step_overhead_ratio": "at most 1.05",
    },
)
