"""Loop-back iterations of a standby: the real step, run alone, with nothing left behind.

Every collective answers as if each peer had sent what we sent. The iterations bring the process
to where a stayer is: optimizer state allocated once, DDP's buckets rebuilt, lazy imports done.
Afterwards parameters, buffers, optimizer, small objects, random generators and loader positions
are what they were, shown by digest.
"""

from __future__ import annotations

import torch

from trainmover.errors import StateMismatch
from trainmover.state.inventory import Inventory
from trainmover.state.rng import capture_rng, restore_rng
from trainmover.worker.batches import Batches


class Keeper:
    """State of a standby before its loop-back iterations."""

    def __init__(self, inventory: Inventory, batches: list[Batches]) -> None:
        self._inventory = inventory
        self._batches = batches
        self._manifest = inventory.manifest()
        self._tensors = [tensor.detach().clone() for _, tensor in inventory.bulk()]
        self._smalls = {name: inventory.small_bytes(name) for name in inventory.small_names}
        self._positions = [item.position() for item in batches]
        self._rng = capture_rng()
        self._grads = [
            (parameter, None if parameter.grad is None else parameter.grad.detach().clone())
            for model in inventory.models
            for parameter in model.parameters()
        ]
        self._digest = inventory.bulk_digest()

    def put_back(self) -> None:
        """Restore all of it. Raises StateMismatch if the digest is not what it was."""
        self._inventory.conform(self._manifest)
        with torch.no_grad():
            for (_, tensor), kept in zip(self._inventory.bulk(), self._tensors, strict=True):
                tensor.copy_(kept)
            for parameter, grad in self._grads:
                parameter.grad = grad
        for name, data in self._smalls.items():
            self._inventory.load_small(name, data)
        for item, position in zip(self._batches, self._positions, strict=True):
            item.restore(position)
        restore_rng(self._rng)
        self._tensors = []
        after = self._inventory.bulk_digest()
        if after != self._digest:
            raise StateMismatch(
                "state after the loop-back iterations differs from the state before: expected "
                f"digest {self._digest:016x}, got {after:016x}"
            )
