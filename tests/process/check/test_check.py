"""`trainmover check`: each kind of finding, with the place in the script and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("faulty.py")


def check(faults: str) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, "-m", "trainmover.cli", "check", str(SCRIPT), faults],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return result.returncode, result.stdout.strip().splitlines()


def place(mark: str) -> str:
    lines = SCRIPT.read_text().splitlines()
    return f"faulty.py:{1 + next(i for i, line in enumerate(lines) if f'# mark: {mark}' in line)}"


def test_what_would_differ_after_a_loss_is_found() -> None:
    code, lines = check("ema,rank,write,carried,counter,tail")
    text = "\n".join(lines)
    assert code == 1, text
    for mark, kind, remedy in (
        ("ema", "[untracked] found but not tracked: AveragedModel 'ema'", "track(ema=...)"),
        ("write", "[shadow-write]", "if job.is_primary:"),
        ("carried", "[carried] 'ahead' carries a batch", "take every batch inside its step"),
        ("counter", "[carried] 'seen' carries a value that is not tracked", "trainmover.Value"),
        ("tail", "[tail-collective] all_reduce", 'step.log(..., reduce="mean")'),
        ("rank", "note: [rank]", "DistributedSampler"),
    ):
        found = [line for line in lines if line.startswith(f"{place(mark)}: {kind}")]
        assert len(found) == 1, f"{mark}:\n{text}"
        assert remedy in found[0]
    assert any("[numbers] step 2 differs" in line for line in lines), text
    assert lines[-1].startswith("6 findings in")


def test_a_batch_changed_in_place_and_a_loader_that_communicates() -> None:
    code, lines = check("inplace,loader")
    text = "\n".join(lines)
    assert code == 1, text
    assert any(line.startswith(f"{place('loader')}: [loader-collective]") for line in lines), text
    (told,) = [line for line in lines if "changed in place" in line]
    assert "[script] ScriptError: batch" in told
    assert "copy=True" in told


def test_a_script_that_only_reads_its_rank_passes_with_a_note() -> None:
    code, lines = check("rank")
    assert code == 0, "\n".join(lines)
    assert [line for line in lines if line.startswith(f"{place('rank')}: note: [rank]")]
    assert lines[-1].endswith("can be interrupted at any step")
