"""Summaries follow from samples alone, and a file whose summary does not is caught."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from trainmover.drills import (
    bench_collectives,
    bench_file,
    bench_memory,
    bench_overhead,
    bench_recovery,
)
from trainmover.errors import ConfigError

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (bench_collectives, bench_memory, bench_overhead, bench_recovery)
}


def blocks(with_s: float, without_s: float) -> list[dict[str, Any]]:
    """Of one rank: a block without the gate, then one with it."""
    found = []
    for index in range(12):
        without = {"kind": "without", "block": index, "steps_s": [without_s] * 20}
        found.append({**without, "worker_cpu_s": 0.02, "io_cpu_s": 0.01})
        within = {"kind": "with", "block": index + 1, "steps_s": [with_s] * 20}
        found.append({**within, "worker_cpu_s": 0.03, "io_cpu_s": 0.012})
    return found


OVERHEAD = {
    "block": 20,
    "sleeping": [blocks(0.1005, 0.1001)] * 4,
    "training": [blocks(0.1005, 0.1)] * 4,
}
CASES = ((2, True, 1), (4, True, 0.5), (2, False, 1.5), (8, False, 9))
COLLECTIVES = {
    "cases": [
        {
            "collective": "all_reduce",
            "bytes": 1024,
            "ranks": ranks,
            "is_local": is_local,
            "ours_s": [0.9 * factor] * 7,
            "gloo_s": [1.0] * 7,
        }
        for ranks, is_local, factor in (
            (2, True, 1),
            (4, True, 0.5),
            (2, False, 1.5),
            (8, False, 9),
        )
    ]
}


def repetition(planned_s: float, unplanned_s: float) -> dict[str, Any]:
    def incident(kind: str, downtime_s: float) -> dict[str, Any]:
        return {"kind": kind, "downtime_s": downtime_s, "summary": {"steps_lost": 0}}

    return {
        "ours": {
            "incidents": [incident("planned", planned_s), incident("standby", unplanned_s)],
            "step_s": 0.1,
            "is_identical": True,
        },
        "restart_planned": {"downtime_s": 20.0},
        "restart_unplanned": {"downtime_s": 15.0, "to_new_s": 16.0},
    }


RECOVERY = {"eager": [repetition(0.2, 0.5)] * 3, "compile": [], "alone": {"downtime_s": 6.0}}


def test_the_overhead_of_a_gate_is_a_difference_of_blocks() -> None:
    found = bench_overhead.summarise(OVERHEAD)
    assert found["gate_latency_ms"] == pytest.approx(0.4)
    assert found["gate_cpu_ms"] == pytest.approx(1000 * (0.01 + 0.002) / 20)
    assert found["ratio"] == pytest.approx(1.005)
    assert found["ratio_low"] == found["ratio_high"] == found["ratio"]


def test_the_median_lies_in_its_interval_as_often_as_promised() -> None:
    draw = random.Random(5)
    hits = 0
    for _ in range(400):
        low, high = bench_overhead.median_interval([draw.gauss(1, 1) for _ in range(12)], 0.9)
        hits += low <= 1 <= high
    assert hits >= 0.88 * 400


def test_eight_ranks_are_reported_and_not_judged() -> None:
    found = bench_collectives.summarise(COLLECTIVES)
    assert found["worst_ratio_vs_gloo"] == pytest.approx(1.35)
    assert found["local_worst_ratio_vs_gloo"] == pytest.approx(0.9)
    assert found["local_median_ratio_vs_gloo"] == pytest.approx(0.675)


def test_recovery_is_told_as_ratios_to_a_restart() -> None:
    found = bench_recovery.summarise(RECOVERY)
    assert found["planned_ratio_vs_restart"] == pytest.approx(100)
    assert found["unplanned_ratio_vs_restart"] == pytest.approx(30)
    assert found["unplanned_compile_ratio_vs_restart"] is None
    assert found["steps_lost"] == 0
    assert found["identical"] is True


def test_memory_is_set_against_the_training_peak() -> None:
    def line(moment: str, pid: int, high: int, tensors: int) -> dict[str, Any]:
        common = {"rank": 0, "step": 1, "buffer_bytes": 0}
        return common | {
            "moment": moment,
            "pid": pid,
            "high_water_bytes": high,
            "tensor_bytes": tensors,
        }

    lines = [line("trained", 1, 1000, 100), line("trained", 2, 1000, 100)]
    lines += [line("switched", 1, 1010, 90), line("left", 2, 990, 80), line("joined", 3, 900, 90)]
    found = bench_memory.summarise({"lines": lines})
    assert found["rss_stayer_peak_ratio"] == pytest.approx(1.01)
    assert found["leaver_peak_ratio"] == pytest.approx(0.8)
    assert found["joiner_peak_ratio"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("name", "samples"),
    [("overhead", OVERHEAD), ("collectives", COLLECTIVES), ("recovery", RECOVERY)],
)
def test_a_changed_summary_is_caught(name: str, samples: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    bench_file.write(path, bench_file.document(BENCHMARKS[name], samples, time.time()))
    content = bench_file.read(path)
    assert not bench_file.verify(content, BENCHMARKS)
    figure = next(n for n, v in content["summary"].items() if isinstance(v, float))
    content["summary"][figure] *= 1.5
    (wrong,) = bench_file.verify(content, BENCHMARKS)
    assert figure in wrong


def test_another_file_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no benchmark file"):
        bench_file.read(path)
