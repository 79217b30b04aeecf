"""What the tests' own check for leftovers blames on whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import conftest

from trainmover.daemons.run_directory import RunDirectory


def test_what_a_neighbours_job_leaves_is_not_ours(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path / "job" / "run"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    ours = RunDirectory(run).runtime.name
    theirs = RunDirectory(tmp_path.parent / "another suite" / "run").runtime.name
    names = {ours, theirs, "torch_1_2"}
    assert conftest.of_neighbours(names, tmp_path_factory.getbasetemp()) == {theirs}
