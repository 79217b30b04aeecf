"""A recording answers as the peers did, and recording leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from tests.process.communicator.fleet import run_ranks
from tests.process.rehearsal import cases


def test_a_standby_gets_what_the_member_got(tmp_path: Path) -> None:
    results = run_ranks(3, cases.recorded_and_answered, str(tmp_path))
    for refused, before_s, after_s in results:
        assert "expected all_reduce SUM of [5] float32 among 3 (case.py:1)" in refused
        assert "got all_reduce SUM of [6] float32 among 3, called at case.py:2" in refused
        print(f"CPU per all-reduce: {before_s * 1e6:.1f} us before, {after_s * 1e6:.1f} us after")


def test_what_does_not_cross_machines_is_not_kept() -> None:
    assert run_ranks(2, cases.recordless_bytes) == [1, 1]
