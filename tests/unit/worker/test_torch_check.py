"""E8: a torch that behaves otherwise is refused at the start, by name."""

from __future__ import annotations

import pytest
import torch

from trainmover.communicator import Group
from trainmover.errors import IncompatibleMachine
from trainmover.worker.torch_check import TESTED, check_torch


def test_the_tested_torch_passes_without_a_word() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in TESTED
    assert check_torch(Group) == ""


def test_an_untested_release_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    assert "9.1.0" in check_torch(Group)


def test_a_missing_collective_is_refused() -> None:
    class Lacking:
        allreduce = None

    with pytest.raises(IncompatibleMachine, match="allreduce, allreduce_coalesced"):
        check_torch(Lacking)  # type: ignore[arg-type]


def test_another_hook_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: torch.optim.Optimizer, hook: object) -> None:
        del self, hook

    monkeypatch.setattr(torch.optim.Optimizer, "register_step_pre_hook", never)
    with pytest.raises(IncompatibleMachine, match="pre-hooks behave otherwise"):
        check_torch(Group)
