"""C21: state that changes at once behind an asynchronous save, in place and everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cases.runs import kill_all
from tests.process.emergency.jobs import slow, slow_library, steps_of
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest

__all__ = ["slow_library"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).with_name("rising.py")


@pytest.mark.parametrize(
    ("saves", "elements"), [(3, 500_000), pytest.param(20, 4_000_000, marks=pytest.mark.long)]
)
def test_c21_what_is_saved_is_the_state_of_one_step(
    saves: int, elements: int, slow_library: Path, tmp_path: Path
) -> None:
    """While the slow writer writes, each step changes every byte; none of that is in the files."""
    wanted = JobRequest(
        script=SCRIPT,
        arguments=("--elements", str(elements)),
        machines=1,
        standbys=0,
        flags=("--checkpoints", str(tmp_path / "ckpt")),
        settings=(
            ("checkpoint.cadence", "every 2 steps"),
            ("checkpoint.keep_last", str(saves + 10)),
            ("snapshot.cadence", "every 2 steps"),
        ),
        environment=slow(slow_library, tmp_path, 100),
        limit_s=200.0,
    )
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for(lambda: len(steps_of(tmp_path)) >= saves or None, "they count", 150.0)
        kill_all(job)
    steps = steps_of(tmp_path)
    assert steps[-1] - steps[0] > 2 * (len(steps) - 1), "steps were made while one was written"
    for step in steps:
        (folder,) = (tmp_path / "ckpt").glob(f"step-{step:010d}-*")
        (shard,) = folder.glob("*.safetensors")
        large = {name: t for name, t in load_file(shard).items() if t.numel() == elements}
        assert len(large) == 2, sorted(large)
        values = {tuple(tensor.unique().tolist()) for tensor in large.values()}
        assert values == {(step * (step + 1) / 2,), (-float(step),)}
