"""The baseline really trains, is really killed, comes back, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmover.drills.baseline import (
    BaselineConfig,
    run_planned_baseline,
    run_unplanned_baseline,
)

SCRIPT = Path(__file__).parents[3] / "examples" / "baselines" / "torchrun_dcp.py"
SMALL = ("--layers", "1", "--width", "32", "--batch", "2", "--sequence", "32", "--workers", "1")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["unplanned", "planned"])
def test_torchrun_restarts_from_its_checkpoint(tmp_path: Path, kind: str) -> None:
    config = BaselineConfig(
        script=SCRIPT,
        folder=tmp_path,
        script_arguments=SMALL,
        ranks=2,
        agents="single",
        steps=14,
        fault_step=7,
        fault_rank=1,
        hold_at=9,
        checkpoint_every=5,
        limit_s=180,
    )
    run = run_unplanned_baseline if kind == "unplanned" else run_planned_baseline
    found = run(config)
    assert found["downtime_s"] > 0
    # The victim is killed behind step 7 or 8 (which its peer may not have noted any more), and
    # step 5 is the last checkpoint.
    assert found["redone"] in (2, 3, 4) if kind == "unplanned" else found["redone"] == 0
    assert set(found["losses"]) == {str(step) for step in range(14)}
