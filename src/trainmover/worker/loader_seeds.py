"""Random numbers in loader worker processes: a function of the batch, not of who reads it when.

torch seeds a worker process once; what it draws for a sample then depends on all batches that this
very process has read before, and a process that starts in the middle of an epoch draws other
numbers. Here every batch begins with generators seeded by its epoch and its place in it, so
augmentation is the same whichever process reads the batch: the first, a joiner's, one with another
number of workers, under `python FILE` as well.

Decides seeds only. A generator that a dataset owns is not reached (see `loader_source`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data._utils.fetch import _MapDatasetFetcher

NUMPY_SEED_BITS = 32


@dataclass(frozen=True, slots=True)
class Numbered:
    """What a worker process is sent instead of bare indices."""

    indices: Any
    seed: int
    """63 bits."""


def batch_seed(epoch_seed: int, number: int) -> int:
    """Seed of batch `number` of the epoch, 63 bits."""
    text = f"{epoch_seed} {number}".encode()
    return xxhash.xxh3_64_intdigest(text) >> 1


def epoch_seed(start: bytes, epoch: int) -> int:
    """Seed of an epoch from the random state in which it was begun."""
    return xxhash.xxh3_64_intdigest(start + epoch.to_bytes(8, "little"))


def seed_generators(seed: int) -> None:
    """Global generators of this process: torch's, Python's, and NumPy's where it is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & ((1 << NUMPY_SEED_BITS) - 1))


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """`worker_init_fn` of the loader's iterators: the script's own, then the reading of seeds."""

    inner: Callable[[int], object] | None

    def __call__(self, worker: int) -> None:
        """In the worker process, before its first batch."""
        if self.inner is not None:
            self.inner(worker)
        kind: Any = _MapDatasetFetcher
        fetch = kind.fetch

        def seeded(fetcher: Any, indices: Any) -> Any:
            if isinstance(indices, Numbered):
                seed_generators(indices.seed)
                indices = indices.indices
            return fetch(fetcher, indices)

        # Of this process alone: it does nothing but read this loader's batches.
        kind.fetch = seeded
