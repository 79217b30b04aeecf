"""State of one rank as a plain dictionary, for checkpoints a script makes by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from trainmover.errors import StateMismatch
from trainmover.state.manifest import StateManifest
from trainmover.state.rng import capture_rng, restore_rng

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


def hand_made_state(stepper: Stepper) -> dict[str, Any]:
    """Everything `_capture_personal` and the inventory hold, as plain dict of tensors."""
    return {
        "step": stepper.step_index,
        "manifest": msgspec.msgpack.encode(stepper.inventory.manifest()),
        "bulk": {name: tensor.detach().clone() for name, tensor in stepper.inventory.bulk()},
        "small": {
            name: stepper.inventory.small_bytes(name) for name in stepper.inventory.small_names
        },
        "batches": [batches.position() for batches in stepper.batches],
        "rng": capture_rng(),
    }


def load_hand_made(stepper: Stepper, state: Mapping[str, Any]) -> None:
    """Inverse of `hand_made_state`, on a rank that has just built its objects."""
    manifest = msgspec.msgpack.decode(state["manifest"], type=StateManifest)
    # A fresh optimizer has no state to load into before its first step.
    stepper.inventory.conform(manifest)
    _load_bulk(stepper, state["bulk"])
    for name, data in state["small"].items():
        stepper.inventory.load_small(name, data)
    for batches, position in zip(stepper.batches, state["batches"], strict=True):
        batches.restore(position)
    restore_rng(state["rng"])
    stepper.step_index = int(state["step"])


def _load_bulk(stepper: Stepper, saved: Mapping[str, torch.Tensor]) -> None:
    live = dict(stepper.inventory.bulk())
    missing = sorted(set(live) ^ set(saved))
    if missing:
        raise StateMismatch(
            f"job.load_state_dict(): expected the names this job tracks; differing: {missing[0]}"
            f" and {len(missing) - 1} more"
        )
    with torch.no_grad():
        for name, tensor in live.items():
            if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
                raise StateMismatch(
                    f"job.load_state_dict(): {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                    f"saved was {tuple(saved[name].shape)} {saved[name].dtype}"
                )
            tensor.copy_(saved[name])
