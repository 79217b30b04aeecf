"""Summaries of the benchmarks of issue 3 follow from samples; broken promises are told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from trainmover.drills import (
    bench_ablation,
    bench_file,
    bench_rebalance,
    bench_scale,
    bench_straggler,
    core_share,
    ladder,
)

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (bench_ablation, bench_rebalance, bench_scale, bench_straggler)
}


def stage(downtime_s: float, connect_s: float | None = None) -> dict[str, Any]:
    return {"downtime_s": downtime_s, "connect_s": connect_s, "is_identical": True}


def ladder_run(mode: str, ranks: int, *downtimes_s: float) -> dict[str, Any]:
    restart_s, live_s, incremental_s, rehearsed_s = downtimes_s
    stages = {
        "restart": [{"downtime_s": restart_s}] * 3,
        "live_state": [stage(live_s, 0.06)] * 3,
        "incremental": [stage(incremental_s, 0.02)] * 3,
        "rehearsed": [stage(rehearsed_s, 0.02)] * 3,
    }
    if mode == "compile":
        stages["handed_caches"] = [stage(incremental_s / 2, 0.02)] * 3
    return {"mode": mode, "ranks": ranks, "stages": stages}


ABLATION = {
    "runs": [
        ladder_run("eager", 4, 20.0, 4.0, 4.5, 0.2),
        ladder_run("eager", 8, 30.0, 6.0, 5.0, 0.4),
        ladder_run("compile", 4, 120.0, 60.0, 50.0, 0.5),
    ]
}


def scale_side(opened: int, state_bytes: int, machines: int) -> dict[str, Any]:
    traffic = {
        "messages_sent": 2,
        "messages_received": 2,
        "messages_repeated": 0,
        "frames_sent": machines,
        "bytes_sent": 64 * machines,
    }
    stayer = {"is_joiner": False, "opened": opened, "inherited": 1, "bytes_received": 0}
    joiner = {"is_joiner": True, "opened": 3, "inherited": 0, "bytes_received": state_bytes}
    return {
        "downtime_s": 0.1,
        "roles": [stayer | {"traffic": traffic}, joiner | {"traffic": None}],
        "cpu": [{"ran_s": 0.3, "waited_s": 0.1}],
    }


def scale(*opened: int) -> dict[str, Any]:
    runs = [
        {
            "machines": machines,
            "planned": scale_side(1, 4096, machines),
            "unplanned": scale_side(count, 4096, machines),
            "is_identical": True,
        }
        for machines, count in zip((2, 4), opened, strict=True)
    ]
    return {"runs": runs}


def rebalance() -> dict[str, Any]:
    last, now_s = {}, 0.0
    for step in range(101):
        now_s += 0.4 if step in (30, 60) else 0.1
        last[str(step)] = now_s
    return {
        "interval": 30,
        "incidents": [{"resumed_step": 30}, {"resumed_step": 60}],
        "last": last,
        "undisturbed_step_s": 0.08,
        "restart": {"downtime_s": 9.0, "step_s": 0.1},
        "is_identical": True,
    }


def straggler() -> dict[str, Any]:
    last, now_s = {}, 0.0
    for step in range(200):
        now_s += 0.12 if 75 <= step < 90 else 0.3 if step == 90 else 0.1
        last[str(step)] = now_s
    run = {"form": "sleep", "means": "a sleep", "incidents": [{"resumed_step": 90}]}
    return {
        "runs": [run | {"last": last, "is_identical": True}],
        "hold_at": 20,
        "slow_from": 75,
        "share": 0.2,
    }


def test_each_part_is_set_against_the_one_before() -> None:
    found = bench_ablation.summarise(ABLATION)
    assert found["restart_s"] == 20.0
    assert found["ratio_vs_restart"] == pytest.approx(100)
    assert found["ratio_vs_unrehearsed"] == pytest.approx(22.5)
    assert found["each_part_lowers"] is False
    assert found["rehearsed_s_8_ranks"] == 0.4
    assert found["each_part_lowers_8_ranks"] is True
    assert found["compile_ratio_vs_restart"] == pytest.approx(240)
    assert found["compile_ratio_vs_unrehearsed"] == pytest.approx(100)
    assert found["compile_handed_caches_s"] == 25.0
    (why,) = bench_ablation.notes(ABLATION)
    assert "60 ms" in why
    assert "20 ms" in why


def test_the_ladder_is_one_table_and_one_picture(tmp_path: Path) -> None:
    heads, *rows = bench_ablation.table_rows(ABLATION)
    assert heads[1:] == ["eager, 4 ranks", "eager, 8 ranks", "compile, 4 ranks"]
    assert [row[0] for row in rows[:2]] == ["restart from checkpoint", "+ live state"]
    ladder.draw(tmp_path / "ladder.png", ABLATION)
    assert (tmp_path / "ladder.png").stat().st_size > 1000


def test_equal_counts_pass_and_what_grows_is_only_told() -> None:
    assert bench_scale.failures(scale(1, 1)) == []
    found = bench_scale.summarise(scale(1, 1))
    assert found["counts_equal"] is True
    assert found["planned_s_by_machines_4"] == 0.1
    assert found["unplanned_waiting_share_2"] == pytest.approx(0.25)


def test_a_count_that_grows_with_the_machines_is_a_failure() -> None:
    (wrong,) = bench_scale.failures(scale(1, 2))
    assert "unplanned: connections_opened" in wrong
    untold = scale(1, 1)
    for role in untold["runs"][0]["planned"]["roles"]:
        role["traffic"] = None
    assert any("messages_sent" in line for line in bench_scale.failures(untold))


def test_the_gaps_around_moves_are_what_is_lost() -> None:
    found = bench_rebalance.summarise(rebalance())
    wall_s = 80 * 0.1 + 2 * 0.3
    assert found["ettr"] == pytest.approx((wall_s - 0.6) / wall_s)
    assert found["ettr_restart"] == pytest.approx(3 / 12)
    assert found["slowdown_between"] == pytest.approx(1.25)
    assert found["identical"] is True


def test_slow_steps_and_the_move_itself_both_count() -> None:
    found = bench_straggler.summarise(straggler())
    assert found["sleep_lost_share"] == pytest.approx(1 - 17.9 / (17.9 + 15 * 0.02 + 0.2))
    assert found["sleep_slow_step_ratio"] == pytest.approx(1.2)
    assert found["sleep_downtime_steps"] == pytest.approx(2.0)
    kept = found["sleep_lost_share_if_kept"]
    assert kept == pytest.approx(1 - 17.9 / (17.9 + 124 * 0.02))


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("ablation", ABLATION),
        ("scale", scale(1, 1)),
        ("rebalance", rebalance()),
        ("straggler", straggler()),
    ],
)
def test_a_changed_summary_is_caught(name: str, samples: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    bench_file.write(path, bench_file.document(BENCHMARKS[name], samples, time.time()))
    content = bench_file.read(path)
    assert not bench_file.verify(content, BENCHMARKS)
    figure = next(n for n, v in content["summary"].items() if isinstance(v, float) and v > 0)
    content["summary"][figure] *= 1.5
    (wrong,) = bench_file.verify(content, BENCHMARKS)
    assert figure in wrong


def test_the_kernel_counts_the_time_of_a_process() -> None:
    import os

    before = core_share.read(os.getpid())
    assert before is not None
    sum(range(10**6))
    after = core_share.read(os.getpid())
    assert after is not None
    assert (after - before).ran_s > 0
    assert core_share.read(2**22 + 1) is None
