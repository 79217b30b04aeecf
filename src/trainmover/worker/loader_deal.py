"""One loader's part in dealing epochs out: its layout, what stands in for its sampler, who is next.

Decides what a loader reads in an epoch that another number of ranks has begun, and what is refused
then. The arithmetic is in `loader_shares`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from torch.utils.data import SequentialSampler

from trainmover.errors import StateMismatch
from trainmover.state.codec import decode_plain
from trainmover.worker.loader_place import Cursor
from trainmover.worker.loader_shares import (
    Layout,
    Share,
    batches_of,
    dealt,
    does_drop,
    epoch_order,
    layout_of,
    left_after,
    rest_of,
    taken,
    why_unknown,
)
from trainmover.worker.sampler_state import generators_of, knows_rank, samplers_of

HOOK = "reshard_state"
"""Method with which a dataset of its own state says how that state is dealt out anew."""


class Deal:
    """How one loader's epochs are dealt out.

    Attributes:
        layout: Of the loader; None where a rank's part is not known.
        shares: What others have read of the epoch of now.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.shares: tuple[Share, ...] = ()
        self.layout: Layout | None = None
        self.look_again()

    def look_again(self) -> None:
        """The sampler's rank may have changed. Only while nothing stands before the sampler."""
        known = self.layout
        found = layout_of(self._loader)
        self.layout = found if found is not None or known is None else _with_rank(known, self)

    def sampler_place(self) -> tuple[int, int] | None:
        """(rank, replicas) of the first sampler that has them."""
        for sampler in samplers_of(self._loader):
            if hasattr(sampler, "num_replicas"):
                return sampler.rank, sampler.num_replicas
        return None

    # ------------------------------------------------------------------ the epoch of now

    def _part(self, epoch: int) -> list[int]:
        assert self.layout is not None
        return dealt(rest_of(epoch_order(self._loader, epoch), self.shares), self.layout)

    def stand_in(self, epoch: int) -> Any:
        """What to read in the place of the sampler; None: the sampler."""
        return batches_of(self._loader, self._part(epoch)) if self.shares else None

    def batch_count(self, epoch: int) -> int:
        """Batches of an epoch that was dealt out anew; 0 of any other."""
        if not self.shares or self.layout is None:
            return 0
        left = left_after(self.layout.samples, self.shares)
        pads, readers, size = self.layout.does_pad, self.layout.readers, self.layout.batch_size
        part = -(-left // readers) if pads else left // readers
        return part // size if does_drop(self._loader) else -(-part // size)

    def open(self, epoch: int) -> Iterator[Any]:
        """An iterator of a loader that can't be tapped."""
        stand_in = self.stand_in(epoch)
        if stand_in is None:
            return iter(self._loader)
        place = "sampler" if self._loader.batch_sampler is None else "batch_sampler"
        own = self._loader.__dict__[place]
        # Around DataLoader.__setattr__: only for as long as the iterator is made.
        self._loader.__dict__[place] = stand_in
        try:
            return iter(self._loader)
        finally:
            self._loader.__dict__[place] = own

    # ------------------------------------------------------------------ another number of ranks

    def is_alike(self, cursors: Sequence[Cursor]) -> bool:
        """Whether all ranks stand at one place because nothing is dealt out: each reads it all."""
        if self.layout is not None or any(cursor.layout is not None for cursor in cursors):
            return False
        if knows_rank(self._loader):
            return False
        if cursors[0].state is not None and len(cursors) == 1:
            return False  # of a stream: whether its ranks would share it is not known
        return len({_order(self._loader, cursor) for cursor in cursors}) == 1

    def take_over(self, cursors: Sequence[Cursor]) -> int:
        """The epoch of which ranks like this one read the rest from now on.

        Raises:
            StateMismatch: Other data, another order, or ranks that contradict each other.
        """
        assert self.layout is not None
        layouts = [cursor.layout for cursor in cursors if cursor.layout is not None]
        if len(layouts) < len(cursors):
            raise StateMismatch("the loader deals its data out to ranks here, and did not there")
        first = cursors[0]
        if len({(cursor.epoch, cursor.start.shares) for cursor in cursors}) > 1:
            epochs = sorted({cursor.epoch for cursor in cursors})
            raise StateMismatch(f"ranks stand in different epochs of their data: {epochs}")
        there, here = layouts[0], self.layout
        if (there.samples, there.order) != (here.samples, here.order):
            raise StateMismatch(
                f"the sampler reads {here.samples} samples in another order than where the "
                f"position comes from ({there.samples} samples): keep dataset, seed and shuffle"
            )
        before = first.start.shares
        share = taken(layouts, [cursor.fetched for cursor in cursors], before)
        shares = (*before, share) if any(share.counts) else before
        if left_after(here.samples, shares) >= (1 if here.does_pad else here.readers):
            self.shares = shares
            if self.batch_count(first.epoch):
                return first.epoch
        self.shares = ()
        return first.epoch + 1

    def merged_state(self, cursors: Sequence[Cursor], rank: int, world_size: int) -> Any:
        """State of this rank from those of all ranks there, as the dataset itself says.

        Raises:
            StateMismatch: The dataset does not say.
        """
        dataset = getattr(self._loader, "dataset", self._loader)
        merge = getattr(dataset, HOOK, None)
        states = [cursor.state for cursor in cursors]
        if not callable(merge) or any(state is None for state in states):
            raise StateMismatch(self._refusal(len(cursors), world_size))
        return merge([decode_plain(state) for state in states if state is not None],
                     rank, world_size)  # fmt: skip

    def _refusal(self, there: int, here: int) -> str:
        dataset = getattr(self._loader, "dataset", None)
        name = type(self._loader).__name__
        if getattr(dataset, "state_dict", None) is not None:
            why = f"the state of a {type(dataset).__name__} says nothing about ranks"
            remedy = f"give it {HOOK}(states, rank, world_size) and read it with a DataLoader"
        else:
            why = why_unknown(self._loader)
            remedy = "use a DistributedSampler with plain batches"
        return (
            f"{name}: {why}, so a position of {there} ranks can't be dealt out to {here}. Start "
            f"with {there} ranks, or {remedy}"
        )


def _with_rank(known: Layout, deal: Deal) -> Layout:
    place = deal.sampler_place()
    if place is None:
        return known
    return msgspec.structs.replace(known, reader=place[0], readers=place[1])


def _order(loader: Any, cursor: Cursor) -> bytes:
    """Bytes that are equal where two places of this loader are the same place in one order."""
    samplers = samplers_of(loader)
    needs_rng = not (
        (samplers and isinstance(samplers[-1], SequentialSampler))
        or any(generators_of(holder) for holder in (loader, *samplers))
    )
    rng = cursor.start.rng if needs_rng else b""
    start = msgspec.structs.replace(cursor.start, rng=rng)
    return msgspec.msgpack.encode(msgspec.structs.replace(cursor, start=start))
