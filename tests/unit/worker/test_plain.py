"""The same script without an agent: what a step promises holds there, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainmover
from trainmover.errors import ScriptError


def test_after_inside_and_behind_a_step() -> None:
    told: list[str] = []

    def main(job: trainmover.Job) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.track(model=model, optimizer=optimizer)
        for step in job.steps(2):
            with step:
                step.after(lambda index=step.index: told.append(f"inside {index}"))
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                told.append("tail")
            assert step.committed
            step.after(lambda index=step.index: told.append(f"behind {index}"))

    trainmover.run(main)
    assert told == ["tail", "inside 0", "behind 0", "tail", "inside 1", "behind 1"]


def test_the_scripts_own_exception_comes_through() -> None:
    def main(job: trainmover.Job) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trainmover.run(main)
    with pytest.raises(ScriptError, match="outside of main"):
        trainmover.current_job()


def test_ctrl_c_ends_with_the_usual_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main(job: trainmover.Job) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        trainmover.run(main)
    assert caught.value.code == 130
    assert "interrupted in step 0" in capsys.readouterr().out
