"""Which samples of an epoch were read by whom, and who reads the rest at another world size.

Decides how an epoch that several readers have begun side by side goes on with another number of
them: what none has read yet stays in the epoch's order and is dealt out anew, so each sample is
read once. Readers are what the sampler counts, not ranks: ranks that hold parts of one model read
the same share. Needs a sampler whose whole order is known; any other is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import xxhash
from torch.utils.data import BatchSampler, DistributedSampler

from trainmover.errors import StateMismatch
from trainmover.worker.sampler_state import samplers_of

_MASK: Final = (1 << 63) - 1


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of an epoch that some number of readers have read side by side."""

    readers: int
    counts: tuple[int, ...]
    """Samples each reader has read of its part, by reader."""


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How a loader deals an epoch out."""

    samples: int
    readers: int
    reader: int
    batch_size: int
    does_pad: bool
    """Whether parts are filled up to equal length by repeating samples (else cut)."""
    order: int
    """63-bit digest of what the epoch's order follows from."""


def layout_of(loader: Any) -> Layout | None:
    """How `loader` deals its data out; None where that is not known."""
    sampler = _known_sampler(loader)
    if sampler is None or not _has_plain_batches(loader, sampler):
        return None
    facts = f"{sampler.seed} {sampler.shuffle} {_size(sampler)}"
    return Layout(
        _size(sampler),
        sampler.num_replicas,
        sampler.rank,
        _batch_size(loader),
        not sampler.drop_last,
        xxhash.xxh3_64_intdigest(facts.encode()) & _MASK,
    )


def why_unknown(loader: Any) -> str:
    """What about the loader can't be dealt out anew."""
    samplers = samplers_of(loader)
    if not samplers:
        return f"a {type(loader).__name__} without a sampler"
    by_rank = [one for one in samplers if isinstance(one, DistributedSampler)]
    if by_rank and by_rank[0] is not samplers[0] and _known_sampler(loader) is not None:
        return f"batches made by a {type(samplers[0]).__name__}"
    if by_rank:
        return f"a {type(by_rank[0]).__name__}, whose order is its own"
    return f"a {type(samplers[-1]).__name__}, which deals nothing out to ranks"


def taken(layouts: Sequence[Layout], fetched: Sequence[int], before: tuple[Share, ...]) -> Share:
    """What the readers of one stretch have read, from where each rank stands.

    Raises:
        StateMismatch: Ranks contradict each other, or nobody tells of a part.
    """
    first = layouts[0]
    left = left_after(first.samples, before)
    part = -(-left // first.readers) if first.does_pad else left // first.readers
    counts: dict[int, int] = {}
    for layout, batches in zip(layouts, fetched, strict=True):
        if (layout.samples, layout.readers, layout.order) != (
            first.samples,
            first.readers,
            first.order,
        ):
            raise StateMismatch("ranks read their data in different orders; see their samplers")
        count = min(batches * layout.batch_size, part)
        if counts.setdefault(layout.reader, count) != count:
            raise StateMismatch(f"two ranks stand at different places of part {layout.reader}")
    absent = sorted(set(range(first.readers)) - set(counts))
    if absent:
        raise StateMismatch(f"no rank has read part {absent[0]} of {first.readers} of the data")
    return Share(first.readers, tuple(counts[reader] for reader in range(first.readers)))


def left_after(samples: int, shares: tuple[Share, ...]) -> int:
    """How many samples of an epoch nobody has read; those that filled parts up do not count."""
    for share in shares:
        samples -= sum(
            len(range(reader, min(samples, reader + share.readers * count), share.readers))
            for reader, count in enumerate(share.counts)
        )
    return samples


def rest_of(order: Sequence[int], shares: tuple[Share, ...]) -> list[int]:
    """What of an epoch nobody has read yet, in the epoch's order."""
    left = list(order)
    for share in shares:
        left = [
            index
            for place, index in enumerate(left)
            if place // share.readers >= share.counts[place % share.readers]
        ]
    return left


def dealt(left: list[int], layout: Layout) -> list[int]:
    """The reader's part of what is left, as long as everybody else's; perhaps nothing."""
    if layout.does_pad:
        missing = -len(left) % layout.readers
        left = left + [left[place % len(left)] for place in range(missing)]
    else:
        left = left[: len(left) // layout.readers * layout.readers]
    return left[layout.reader :: layout.readers]


def epoch_order(loader: Any, epoch: int) -> list[int]:
    """Indices of a whole epoch, as all readers together read it."""
    sampler = _known_sampler(loader)
    assert sampler is not None
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank, whole.epoch = 1, 0, epoch
    whole.num_samples = whole.total_size = _size(sampler)
    return [int(index) for index in DistributedSampler.__iter__(whole)]


def batches_of(loader: Any, indices: list[int]) -> Any:
    """What the loader reads in the place of its sampler: batches of indices, or indices."""
    if loader.batch_sampler is None:
        return indices
    return BatchSampler(indices, _batch_size(loader), does_drop(loader))


def does_drop(loader: Any) -> bool:
    """Whether an epoch's last batch is left out if it is not full."""
    batches = getattr(loader, "batch_sampler", None)
    return bool(getattr(batches, "drop_last", False))


def _batch_size(loader: Any) -> int:
    batches = getattr(loader, "batch_sampler", None)
    return 1 if batches is None else int(batches.batch_size)


def _size(sampler: Any) -> int:
    return len(sampler.dataset)


def _known_sampler(loader: Any) -> Any:
    """The DistributedSampler beneath the loader, if its order is torch's own."""
    for sampler in samplers_of(loader):
        kind = type(sampler)
        is_torchdata = kind.__module__.startswith("torchdata.")
        if isinstance(sampler, DistributedSampler) and (
            is_torchdata or kind.__iter__ is DistributedSampler.__iter__
        ):
            return sampler
    return None


def _has_plain_batches(loader: Any, sampler: Any) -> bool:
    """Whether batches are the sampler's indices in order, so many at a time."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return getattr(loader, "sampler", None) is sampler
    kind = type(batches)
    is_known = kind is BatchSampler or kind.__module__.startswith("torchdata.")
    return is_known and batches.sampler is sampler
