"""Each benchmark of issue 3 in its smallest form: real jobs, samples that a summary follows from.

Figures are not judged here, apart from counts and bits: a busy machine says nothing about time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainmover.drills import (
    bench_ablation,
    bench_rebalance,
    bench_scale,
    bench_straggler,
    held_job,
    ladder,
)
from trainmover.drills.bench_ablation import STAGES, AblationConfig
from trainmover.drills.bench_rebalance import RebalanceConfig
from trainmover.drills.bench_scale import TINY, ScaleConfig
from trainmover.drills.bench_straggler import StragglerConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def tell(text: str) -> None:
    print(text, flush=True)


def as_read_again(samples: dict[str, Any]) -> dict[str, Any]:
    """Samples as `bench verify` sees them."""
    found: dict[str, Any] = json.loads(json.dumps(samples))
    return found


def test_counts_of_a_stayer_are_the_same_for_two_and_three_machines(tmp_path: Path) -> None:
    config = ScaleConfig(folder=tmp_path, machines=(2, 3), repetitions=1)
    samples = bench_scale.measure(config, tell)
    assert bench_scale.failures(samples) == []
    summary = bench_scale.summarise(samples)
    assert summary["identical"] is True
    assert bench_scale.summarise(as_read_again(samples)) == summary
    for run in samples["runs"]:
        assert bench_scale.counts_of(run["planned"])["connections_opened"] == 1


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_of_the_ablation_lacks_only_its_parts(
    stage: bench_ablation.Stage, tmp_path: Path
) -> None:
    config = AblationConfig(folder=tmp_path, model=TINY)
    shape = bench_ablation.shape_of(config, "eager", 3, stage)
    sample = bench_ablation.run_stage(shape, tmp_path / stage.name, stage)
    assert sample["is_identical"]
    stayers = [role for role in sample["roles"] if not role["is_joiner"]]
    inherited = [role["inherited"] for role in stayers]
    assert inherited == ([0, 0] if stage.name == "live_state" else [1, 1])
    marks = next(
        sample["marks"][str(role["rank"])] for role in sample["roles"] if role["is_joiner"]
    )
    assert "received" in marks


@pytest.mark.long
def test_moves_again_and_again_cost_no_number(tmp_path: Path) -> None:
    config = RebalanceConfig(folder=tmp_path, switchovers=2, interval=30, model=TINY, standbys=2)
    samples = bench_rebalance.run_moves(config, tell)
    assert samples["is_identical"]
    assert [incident["kind"] for incident in samples["incidents"]] == ["planned"] * 2
    assert len(samples["last"]) == config.steps


@pytest.mark.long
def test_moves_are_set_against_a_restart(tmp_path: Path) -> None:
    config = RebalanceConfig(
        folder=tmp_path, switchovers=2, interval=30, model=TINY, standbys=2, baseline_steps=29
    )
    samples = bench_rebalance.measure(config, tell)
    summary = bench_rebalance.summarise(samples)
    assert summary["identical"] is True
    assert summary["switchovers"] == 2
    assert bench_rebalance.summarise(as_read_again(samples)) == summary


@pytest.mark.long
@pytest.mark.parametrize("form", bench_straggler.FORMS)
def test_a_slow_machine_is_switched_over_by_command(form: str, tmp_path: Path) -> None:
    config = StragglerConfig(folder=tmp_path, steps=160, model=TINY, forms=(form,))
    samples = bench_straggler.measure(config, tell)
    summary = bench_straggler.summarise(samples)
    assert summary["identical"] is True
    assert bench_straggler.summarise(as_read_again(samples)) == summary
    (run,) = samples["runs"]
    assert [incident["kind"] for incident in run["incidents"]] == ["planned"]


def test_the_picture_needs_nothing_but_samples(tmp_path: Path) -> None:
    stages = {name: [{"downtime_s": 1.0, "connect_s": 0.1}] for name in bench_ablation.NAMES}
    ladder.draw(tmp_path / "l.png", {"runs": [{"mode": "eager", "ranks": 4, "stages": stages}]})
    assert (tmp_path / "l.png").exists()


def test_a_held_job_has_the_same_command_line_as_the_undisturbed_one(tmp_path: Path) -> None:
    shape = held_job.JobShape(machines=2, steps=9, model=TINY)
    name, value = held_job.held(4, tmp_path)
    assert name not in held_job.request_of(shape).arguments
    assert value == f"4:{tmp_path / held_job.GO}-0"
