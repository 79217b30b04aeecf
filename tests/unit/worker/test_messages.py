"""Mistakes of the first five minutes, each with its sentence; a plain run shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainmover
from trainmover.errors import ScriptError, TrackError
from trainmover.worker import mistakes
from trainmover.worker.distributed_entry import means_ours

Body = Callable[[trainmover.Job, Any], object]


class Parts:
    """An ordinary small training script, in pieces."""

    def __init__(self, job: trainmover.Job) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
        self.batches = job.batches(self.loader)

    def track(self, job: trainmover.Job) -> None:
        job.track(model=self.model, optimizer=self.optimizer)

    def update(self, inputs: torch.Tensor | None = None) -> torch.Tensor:
        if inputs is None:
            (inputs,) = next(self.batches)
        loss: torch.Tensor = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def fails(main: Callable[[trainmover.Job], object]) -> str:
    with pytest.raises((ScriptError, TrackError)) as caught:
        trainmover.run(main)
    assert not dist.is_initialized()
    return str(caught.value)


def test_optimizer_not_tracked() -> None:
    def main(job: trainmover.Job) -> None:
        parts = Parts(job)
        job.track(model=parts.model)
        for step in job.steps(2):
            with step:
                parts.update()

    said = fails(main)
    assert "step 0 ended without a gate: no tracked optimizer stepped" in said
    assert "Tracked: model, loader." in said
    assert "found but not tracked: SGD" in said


def test_no_with_step_in_the_loop() -> None:
    def main(job: trainmover.Job) -> None:
        parts = Parts(job)
        parts.track(job)
        for _ in job.steps(3):
            parts.update()

    said = fails(main)
    assert "steps() gave step 1 but step 0 was never entered (test_messages.py:" in said
    assert "`with step:`" in said


def test_batches_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    def main(job: trainmover.Job) -> None:
        parts = Parts(job)
        parts.track(job)
        for step in job.steps(2):
            with step:
                parts.update(torch.ones(1, 4))

    trainmover.run(main)
    said = capsys.readouterr().out
    assert (
        said.count("step 0 took no batch from job.batches; loader is tracked. An interrupted") == 1
    )


def test_loader_given_to_track() -> None:
    def main(job: trainmover.Job) -> None:
        parts = Parts(job)
        job.track(model=parts.model, optimizer=parts.optimizer, loader=parts.loader)

    assert "batches = job.batches(loader)" in fails(main)


def test_track_twice_inside_and_after() -> None:
    def twice(job: trainmover.Job) -> None:
        parts = Parts(job)
        parts.track(job)
        parts.track(job)

    def inside(job: trainmover.Job) -> None:
        parts = Parts(job)
        parts.track(job)
        for step in job.steps(2):
            with step:
                job.track(late=nn.Linear(1, 1))

    def after(job: trainmover.Job) -> None:
        parts = Parts(job)
        parts.track(job)
        for step in job.steps(2):
            with step:
                parts.update()
            job.track(late=nn.Linear(1, 1))

    assert "track() was called twice" in fails(twice)
    assert "track() was called inside step 0 (test_messages.py:" in fails(inside)
    assert "track() was called after the first step (test_messages.py:" in fails(after)


def test_first_differing_name_of_each_side() -> None:
    said = mistakes.other_names(1, ("model: Net", "ema: Net"), [("model: Net",), ("x",)])
    assert "rank 1 tracks ema: Net, rank 0 nothing more" in said
    said = mistakes.other_names(0, ("a: X", "b: Y"), [("a: X", "b: Y"), ("a: X", "c: Z")])
    assert "rank 0 tracks b: Y, rank 1 c: Z" in said


def test_main_with_a_wrong_signature() -> None:
    def two(job: trainmover.Job, more: int) -> None: ...

    async def later(job: trainmover.Job) -> None: ...

    def pieces(job: trainmover.Job) -> Any:
        yield job

    for main, words in (
        (two, "def two(job: trainmover.Job) -> None; got two(job"),
        (lambda: None, "needs a function of one argument"),
        (7, "got a int"),
        (later, "coroutine function"),
        (pieces, "generator function"),
    ):
        with pytest.raises(ScriptError, match="one argument") as caught:
            trainmover.run(main)  # type: ignore[arg-type]
        assert words in str(caught.value)


def test_main_returns_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    def main(job: trainmover.Job) -> int:
        parts = Parts(job)
        parts.track(job)
        for step in job.steps(2):
            with step:
                parts.update()
        return 42

    trainmover.run(main)
    assert "main returned 42; the value is not used" in capsys.readouterr().out


def test_main_without_a_loop() -> None:
    assert "main returned without entering job.steps()" in fails(lambda job: None)


def test_distributed_functions_in_main(capsys: pytest.CaptureFixture[str]) -> None:
    def main(job: trainmover.Job) -> None:
        dist.init_process_group("nccl")
        parts = Parts(job)
        parts.track(job)
        for step in job.steps(2):
            with step:
                parts.update()
        dist.destroy_process_group()
        assert dist.is_initialized(), "behind main"

    real = dist.init_process_group
    trainmover.run(main)
    assert dist.init_process_group is real
    said = capsys.readouterr().out
    assert said.count("init_process_group: the group exists already") == 1
    assert said.count("destroy_process_group does nothing") == 1


def test_distributed_used_before_run(capsys: pytest.CaptureFixture[str]) -> None:
    def main(job: trainmover.Job) -> None:
        for _ in job.steps(0):
            pass

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainmover.run(main)
    finally:
        dist.destroy_process_group()
    assert "torch.distributed was used before trainmover.run(main)" in capsys.readouterr().out
    told = mistakes.explained(ValueError(f"{mistakes.NO_GROUP}, please make sure to call"))
    assert "used before trainmover.run(main)" in str(told)
    assert mistakes.explained(told.__cause__ or told) is not None
    other = KeyError("x")
    assert mistakes.explained(other) is other


@pytest.mark.parametrize(
    ("backend", "is_ours"),
    [
        (None, True),
        ("gloo", True),
        ("NCCL", True),
        ("cpu:gloo,cuda:nccl", True),
        ("trainmover", True),
        ("ucc", False),
        ("mpi", False),
        ("cpu:gloo,cuda:ucc", False),
    ],
)
def test_which_backends_mean_ours(backend: str | None, is_ours: bool) -> None:
    assert means_ours(backend) is is_ours


def test_loader_worker_hint() -> None:
    error = RuntimeError("DataLoader worker (pid 3) exited unexpectedly with exit code 1.")
    mistakes.add_hint(error)
    assert 'if __name__ == "__main__":' in error.__notes__[0]
    other = ValueError("x")
    mistakes.add_hint(other)
    assert not hasattr(other, "__notes__")
