"""A drill fails where a plan ran into its deadline, whatever became of the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.controller.play import Stage

from trainmover.drills.runner import overdue
from trainmover.protocol import journal


def _logged(directory: Path, text: str) -> Path:
    (directory / "logs").mkdir(parents=True)
    (directory / "logs" / "controller.log").write_text(f"plan 2 (unplanned)\n{text}\ncommitted\n")
    return directory


def test_the_controllers_own_words_for_it_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage().form()
    stage.gate()
    monkeypatch.setattr(stage, "_prepare", lambda actor, plan: None)  # nobody gets done
    stage.kill_machine(stage.machine(1))
    stage.wait(100)
    reasons = [record.reason for record in stage.recorded(journal.AbortRecorded)]
    late = [reason for reason in reasons if "not prepared" in reason]
    assert late, reasons
    (found,) = overdue(_logged(tmp_path / "late", late[0]))
    assert late[0] in found
    assert overdue(_logged(tmp_path / "well", "freeze 3: m3 is gone")) == []
