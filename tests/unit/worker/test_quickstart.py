"""The Python blocks of docs/quickstart.md run, and do what the page says."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainmover

PAGE = Path(__file__).parents[3] / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@lru_cache(maxsize=1)
def names() -> dict[str, Any]:
    """All blocks as one module that is not the main one."""
    text = "\n".join(BLOCK.findall(PAGE.read_text()))
    found: dict[str, Any] = {"__name__": "quickstart"}
    exec(compile(text, str(PAGE), "exec"), found)
    return found


def steps_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("step ")]


def test_block_form(capsys: pytest.CaptureFixture[str]) -> None:
    trainmover.run(names()["main"])
    assert len(steps_of(capsys.readouterr().out)) == 20


def test_callable_form_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[int] = []

    def main(job: trainmover.Job) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told.extend(names()["train"](job, model, optimizer))

    trainmover.run(main)
    assert told == list(range(10))
    assert len(steps_of(capsys.readouterr().out)) == 10


def test_hand_made_checkpoint_goes_on_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "checkpoint.pt")

    def run(resume: bool) -> list[str]:
        torch.manual_seed(3)
        trainmover.run(lambda job: names()["resume_and_save"](job, path, resume))
        return steps_of(capsys.readouterr().out)

    first = run(False)
    second = run(True)
    assert len(first) == 7
    assert len(second) == 5, "resumes behind step 5"
    assert second[:2] == first[5:]
