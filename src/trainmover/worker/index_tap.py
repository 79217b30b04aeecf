"""Sits between a DataLoader and the sampler it reads indices from.

Decides nothing about positions; it lets `loader_source` skip indices without reading their
samples, hold a sampler back while worker processes are started, and notice a sampler whose order
depends on the global random generator in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.rng import capture_host_rng
from trainmover.worker.loader_seeds import Numbered, batch_seed

CHECKED_DRAWS: Final = 3
"""Indices after the first of an epoch before and after which the generators are compared."""


class IndexTap:
    """Iterable over the batches of indices of `inner`.

    Attributes:
        skip: Batches of indices to drop at the start of the next iterator.
        is_held: Whether iterators give nothing at all.
        seed: Of the next iterator's epoch, for worker processes; None where this process reads.
        stand_in: What the next iterator gives instead of `inner`'s, where that is not None.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.skip = 0
        self.is_held = False
        self.seed: int | None = None
        self.stand_in: Any = None
        self.latest: TapIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.is_held:
            return iter(())
        # Eagerly, as the loader itself would: a sampler may draw its order right here.
        source = self.inner if self.stand_in is None else self.stand_in
        self.latest = TapIterator(iter(source), self.skip, type(self.inner).__name__)
        self.latest.seed = self.seed
        return self.latest

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # before __init__, for copy and pickle
        return getattr(self.inner, name)


class TapIterator:
    """Batches of indices of one epoch."""

    def __init__(self, inner: Iterator[Any], skip: int, sampler_kind: str) -> None:
        self._inner = inner
        self._skip = skip
        self._kind = sampler_kind
        self._draws = 0
        self.seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def prime(self) -> None:
        """Do the skipping now, with the random state of now."""
        wanted, self._skip = self._skip, 0
        for done in range(wanted):
            try:
                self._draw()
            except StopIteration:
                raise StateMismatch(
                    f"{self._kind} ended after {done} batches where {wanted} were handed out; "
                    "the data is not the same as where the position comes from"
                ) from None

    def drop(self, count: int) -> None:
        """Skip `count` batches more. Raises StateMismatch: there are not so many."""
        self._skip += count
        self.prime()

    def __next__(self) -> Any:
        if self._skip:
            self.prime()
        indices = self._draw()
        if self.seed is None:
            return indices
        return Numbered(indices, batch_seed(self.seed, self._draws))

    def _draw(self) -> Any:
        self._draws += 1
        if not 1 < self._draws <= CHECKED_DRAWS + 1:
            return next(self._inner)
        before = capture_host_rng()
        indices = next(self._inner)
        if capture_host_rng() != before:
            raise TrackError(
                f"{self._kind} draws from the global random generator in the middle of an epoch, "
                "so its position can't be restored on another machine. Draw the whole order at "
                "the start of __iter__, or give the sampler a torch.Generator of its own"
            )
        return indices


def own_indices(iterator: Any) -> TapIterator | None:
    """Where a loader's iterator takes the next batches from, if this process reads them itself."""
    if not isinstance(iterator, _SingleProcessDataLoaderIter):
        return None
    indices = getattr(iterator, "_sampler_iter", None)
    return indices if isinstance(indices, TapIterator) else None
