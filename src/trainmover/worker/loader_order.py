"""Iterators of loaders that are resumed: where their order of samples goes on, and where it ends.

Decides how a StatefulDataLoader's sampler is brought to the place its state means.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from trainmover.state.rng import capture_host_rng, preserved_rng, restore_rng
from trainmover.worker.sampler_state import capture_samplers, restore_generators


class Exhausted:
    """An iterator at its end, in the place of a loader's that had read its last batch."""

    class _dataset_fetcher:
        ended = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise StopIteration


def has_state(value: Any) -> bool:
    """Whether `value` can say where it stands and be put there."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def settle_order(loader: Any, iterator: Any, generators: bytes) -> None:
    """Make a StatefulDataLoader's sampler go on exactly as where its state comes from.

    Samplers with state of their own draw in another sequence when they are resumed than when they
    ran, so their generators are put where they were. Samplers without are moved on from the start
    of the epoch, which brings the generators along; but without workers a batch sampler that
    torchdata doesn't know is moved only when the first batch is read, and would then see the
    generators of that moment instead of those of now.
    """
    order = getattr(iterator, "_sampler_iter", None)
    if has_state(getattr(order, "sampler_iter", order)):
        restore_generators(loader, generators)
    if not isinstance(order, itertools.islice):
        return
    original = iterator._next_index
    rng, samplers = capture_host_rng(), capture_samplers(loader)

    def first_index() -> Any:
        del iterator._next_index
        with preserved_rng():
            restore_rng(rng)
            restore_generators(loader, samplers)
            return original()

    iterator._next_index = first_index
