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


class ShadowAttempts:
    """How many loop-back iterations a standby runs, and how often each part of a step in them.

    In a step of several parts an attempt is one of one part, and each part's DDP lays out its
    buckets anew in its own second attempt. So a joiner makes the members' attempts in their order:
    one of each part that is behind them, and of the part they stand at whatever is left.
    """

    def __init__(self, exact: int, version: int, limit: int) -> None:
        self._exact = exact
        self._version = version
        self._limit = limit
        self._parts = 0
        self.rounds = 0
        self.made = 0

    @property
    def _is_exact(self) -> bool:
        return 0 <= self._exact <= self._limit * max(1, self._parts)

    def is_due(self, *, is_settled: bool) -> bool:
        """Whether one more iteration is to be run."""
        if self.rounds >= self._limit:
            return False
        return self.made < self._exact if self._is_exact else not is_settled

    def begin(self) -> None:
        """An iteration begins: one attempt, unless it turns out to have parts."""
        self.rounds += 1
        self.made += 1

    def times_of_part(self, *, is_first: bool) -> int:
        """How often the next part of this iteration is run."""
        place, self._parts = self._parts, self._parts + 1
        if is_first:
            self.made -= 1
        times, left = 1, self._exact - self.made
        if self._is_exact:
            times = left if place == self._version else min(left, int(place < self._version))
        self.made += times
        return times


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
