"""What of a batch is copied, and how a batch changed in place is noticed."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch

from trainmover.errors import ScriptError
from trainmover.worker.batches import Batches


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_popping_a_key_does_not_take_it_from_the_repeat() -> None:
    def make() -> dict[str, Any]:
        return {"x": torch.ones(2), "labels": [torch.ones(1)], "inner": UserDict(a=torch.ones(1))}

    batches = Batches(make)
    batches.begin_attempt()
    first = next(batches)
    x = first.pop("x")
    first["labels"].append(3)
    del first["inner"]["a"]
    batches.rewind()
    again = next(batches)
    assert again["x"] is x
    assert len(again["labels"]) == 1
    assert list(again["inner"]) == ["a"]


def test_named_tuples_stay_named_tuples() -> None:
    batches = Batches(lambda: Pair(torch.ones(1), torch.zeros(1)))
    assert isinstance(next(batches), Pair)


def test_a_batch_changed_in_place_is_named() -> None:
    batches = Batches(lambda: {"x": torch.ones(2), "y": torch.ones(2)})
    batches.begin_attempt()
    next(batches)["y"].mul_(2)
    batches.rewind()
    with pytest.raises(ScriptError, match=r"batch\['y'\] was changed in place.*copy=True"):
        next(batches)


def test_an_array_changed_in_place_is_named() -> None:
    batches = Batches(lambda: [torch.ones(2).numpy()])
    batches.begin_attempt()
    next(batches)[0][1] = 5
    batches.rewind()
    with pytest.raises(ScriptError, match=r"batch\[0\] was changed"):
        next(batches)


def test_an_inference_tensor_changed_in_place_is_named() -> None:
    with torch.inference_mode():
        value = torch.ones(2)
    batches = Batches(lambda: value)
    batches.begin_attempt()
    with torch.inference_mode():
        next(batches).add_(1)
    batches.rewind()
    with pytest.raises(ScriptError, match="batch was changed"):
        next(batches)


def test_copies_can_be_changed_in_place() -> None:
    batches = Batches(lambda: {"x": torch.ones(2)}, copy=True)
    batches.begin_attempt()
    next(batches)["x"].mul_(2)
    batches.rewind()
    assert next(batches)["x"].tolist() == [1.0, 1.0]
