"""Position of a DataLoader: read on over epochs, remember where, and go there again.

Decides what a position is. A plain map-style loader: the epoch, the batches handed out in it, and
the random state from which the epoch was begun; going there skips indices and reads no sample
that was handed out. A loader with `state_dict`: that, with the random state beside it. An
iterable dataset without state has no position; what happens then is the user's choice.

Random augmentation in loader worker processes is exact after `restore`: their generators are seeded
for each batch (`loader_seeds`). A generator that the dataset itself owns stands nowhere known, and
is refused. A StatefulDataLoader brings its own worker loop: there, augmentation is exact only if
the script seeds it per sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainmover.errors import ScriptError, StateMismatch, TrackError
from trainmover.state.codec import decode_plain, encode_plain
from trainmover.state.rng import capture_host_rng, preserved_rng, restore_rng
from trainmover.worker.index_tap import IndexTap, own_indices
from trainmover.worker.loader_deal import Deal
from trainmover.worker.loader_order import Exhausted, has_state, settle_order
from trainmover.worker.loader_place import Cursor, EpochStart, names_digest
from trainmover.worker.loader_seeds import WorkerStart, epoch_seed
from trainmover.worker.sampler_state import (
    RankChange,
    capture_samplers,
    generators_of,
    restore_samplers,
    set_epoch,
    set_rank,
)

POLICIES: Final = ("error", "replay", "restart")

READ_OVER_MAX: Final = 32
"""Batches that are read and dropped rather than starting worker processes anew."""


class LoaderSource:
    """Reads a DataLoader (or any re-iterable object with `state_dict`) for ever.

    Attributes:
        epoch: The epoch of the next batch, as far as it is known.
        fetched: Batches fetched in it.
    """

    def __init__(self, loader: Any, on_missing_state: str) -> None:
        self.loader = loader
        self.epoch = 0
        self.fetched = 0
        self._policy = on_missing_state
        self._iterator: Iterator[Any] | None = None
        self._start: EpochStart | None = None
        self._cursor: Cursor | None = None
        self._tap: IndexTap | None = None
        self._parked: Cursor | None = None
        self._is_stateful = has_state(loader)
        dataset = getattr(loader, "dataset", None)
        is_plain_loader = isinstance(loader, DataLoader) and not self._is_stateful
        self._is_iterable = is_plain_loader and isinstance(dataset, IterableDataset)
        self._stateful_dataset: Any = dataset if has_state(dataset) else None
        self._has_dataset_state: bool = (
            self._is_iterable and loader.num_workers == 0 and self._stateful_dataset is not None
        )
        self._is_indexed = is_plain_loader and not self._is_iterable
        self._deal = Deal(loader)
        self._data = names_digest(dataset)
        self._check_has_position()

    def _check_has_position(self) -> None:
        self._check_generators()
        if self._is_stateful or self._is_indexed or self._has_dataset_state:
            return
        if self._policy != "error":
            return
        if self._is_iterable:
            raise TrackError(
                "loader has no state_dict and its dataset is iterable: position can't be saved. Use"
                " StatefulDataLoader, give the dataset state_dict (with num_workers=0), or"
                " on_missing_state='replay' (reads and drops N batches on recovery) / 'restart'"
            )
        raise TrackError(
            f"job.batches got a {type(self.loader).__name__}, which has no state_dict: position "
            "can't be saved. Give it state_dict and load_state_dict, or on_missing_state='replay' "
            "(reads and drops N batches on recovery) / 'restart'"
        )

    def _check_generators(self) -> None:
        if not self._is_indexed or self._policy != "error":
            return
        for name in generators_of(self.loader.dataset):
            raise TrackError(
                f"the loader's dataset has a random generator of its own, '{name}': where it "
                "stands is not part of a position. Seed it from the index in __getitem__, draw "
                "from the global generators, or give job.batches on_missing_state='restart' if "
                "the order of its numbers does not matter"
            )

    def fetch(self) -> Any:
        """The next batch; begins epochs as needed.

        Raises:
            ScriptError: An epoch gave no batch at all.
        """
        if self._parked is not None:
            self.seek(self._parked)
        self._cursor = None
        if self._iterator is None:
            self._begin_epoch()
        for _ in range(2):
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self.fetched == 0:
                    raise ScriptError("the loader gave no batch in a whole epoch") from None
                self._end_epoch()
                self._begin_epoch()
                continue
            self._untap()
            self.fetched += 1
            return batch
        raise ScriptError("the loader gave no batch in a whole epoch")

    @property
    def may_draw(self) -> bool:
        """Whether reading the next batch can draw from this process's global generators.

        In the middle of an epoch worker processes read, and `IndexTap` refuses samplers that draw.
        """
        if not self._is_indexed or self.loader.num_workers == 0:
            return True
        return not 0 < self.fetched < (self._deal.batch_count(self.epoch) or self.length or 0)

    def mark(self) -> Cursor:
        """The place of now."""
        if self._parked is not None:
            return self._parked
        if self._cursor is None:
            start = self._start if self.fetched else self._capture_start()
            assert start is not None
            fetcher = getattr(self._iterator, "_dataset_fetcher", None)
            self._cursor = Cursor(
                self.epoch,
                self.fetched,
                start,
                self._state(),
                self.length,
                capture_samplers(self.loader) if self._is_stateful and self.fetched else None,
                self._has_dataset_state and getattr(fetcher, "ended", False),
                self._deal.layout,
                self._data,
            )
        return self._cursor

    def seek(self, cursor: Cursor) -> None:
        """Go to a place; the global generators stay as they are.

        Raises:
            StateMismatch: The loader here is not like the one the place was taken from.
        """
        if cursor.length != self.length:
            raise StateMismatch(
                f"an epoch has {self.length} batches here and {cursor.length} where the position "
                "comes from: other data, or another batch size"
            )
        self._check_data(cursor)
        if self._is_ahead(cursor):
            self._advance(cursor)
            return
        self._shut_down()
        self._parked = self._cursor = None
        self.epoch, self.fetched = cursor.epoch, cursor.fetched
        self._deal.shares = cursor.start.shares
        with preserved_rng():
            if self._policy == "restart" and not self._can_seek:
                self.fetched = 0
            elif cursor.fetched == 0:
                restore_samplers(self.loader, cursor.start.samplers)
                self._load_state(cursor.state)
            else:
                self._reopen(cursor)
        if self._can_seek:
            self._cursor = cursor

    def _check_data(self, cursor: Cursor) -> None:
        if cursor.data and self._data and cursor.data != self._data:
            raise StateMismatch(
                "the dataset reads from other names here than where the position comes from, or "
                "from the same in another order; sort what a directory listing gives"
            )

    def share_out(self, cursors: Sequence[Cursor], rank: int, world_size: int) -> None:
        """Go to where another number of ranks have left their loaders, given the place of each.

        Raises:
            StateMismatch: It can't be said who is to read what; the message has the remedy.
        """
        first = cursors[0]
        for cursor in cursors:
            self._check_data(cursor)
        self._shut_down()
        self._parked = self._cursor = None
        self._deal.look_again()
        if self._deal.is_alike(cursors):
            self.seek(first)
        elif self._deal.layout is not None:
            self.epoch, self.fetched = self._deal.take_over(cursors), 0
        elif self._policy == "restart" and not self._can_seek:
            self.epoch, self.fetched = first.epoch, 0
        else:
            state = self._deal.merged_state(cursors, rank, world_size)
            self.epoch = first.epoch
            self.fetched = first.fetched if self._stateful_dataset is None else 0
            self._load_state(encode_plain(state, "reshard_state()"))

    def _is_ahead(self, cursor: Cursor) -> bool:
        """Whether `cursor` is a few batches ahead in the epoch that is being read."""
        if self._iterator is None or self._parked is not None or not self._is_indexed:
            return False
        if cursor.epoch != self.epoch or cursor.start != self._start or not self.fetched:
            return False
        return 0 <= cursor.fetched - self.fetched <= READ_OVER_MAX

    def _advance(self, cursor: Cursor) -> None:
        """Read over to `cursor`, or drop indices: worker processes and orders cost more to make."""
        with preserved_rng():
            if indices := own_indices(self._iterator):
                indices.drop(cursor.fetched - self.fetched)
                self.fetched = cursor.fetched
            while self.fetched < cursor.fetched:
                self.fetch()
        self._cursor = cursor

    @property
    def length(self) -> int | None:
        """Batches in an epoch, where the loader knows."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def set_rank(self, change: RankChange) -> bool:
        """Change the rank inside samplers in place; False if one may be held elsewhere."""
        is_free, has_changed = set_rank(self.loader, change)
        self._deal.look_again()
        if has_changed and self._iterator is not None:
            self.close()  # what it reads on is the other rank's
            self.seek(self.mark())
        return is_free

    def close(self) -> None:
        """Shut worker processes down; the next fetch or seek starts new ones."""
        if self._iterator is not None:
            self._parked = self.mark()
        self._shut_down()

    def _shut_down(self) -> None:
        iterators = [self._iterator, getattr(self.loader, "_iterator", None)]
        self._iterator = None
        self._untap()
        for iterator in iterators:
            shut_down = getattr(iterator, "_shutdown_workers", None)
            if callable(shut_down):
                shut_down()
        if isinstance(self.loader, DataLoader):
            self.loader._iterator = None

    @property
    def _can_seek(self) -> bool:
        return self._is_stateful or self._is_indexed or self._has_dataset_state

    def _capture_start(self) -> EpochStart:
        keeps_workers = getattr(self.loader, "persistent_workers", False)
        is_reset = bool(keeps_workers) and getattr(self.loader, "_iterator", None) is not None
        samplers = capture_samplers(self.loader)
        return EpochStart(capture_host_rng(), samplers, is_reset, self._deal.shares)

    def _end_epoch(self) -> None:
        self.epoch, self.fetched = self.epoch + 1, 0
        if self._deal.shares:
            self._deal.shares = ()
            if self._is_stateful:
                # Its worker processes would go on with the sampler that stood in for this epoch.
                self._shut_down()

    def _begin_epoch(self) -> None:
        set_epoch(self.loader, self.epoch)
        self._start = self._capture_start()
        self._iterator = self._open(0)

    def _open(self, skip: int) -> Iterator[Any]:
        """Make the loader's iterator, which drops `skip` batches of indices first."""
        if not self._is_indexed:
            return self._deal.open(self.epoch)
        tap = self._install_tap()
        tap.skip = skip
        tap.stand_in = self._deal.stand_in(self.epoch)
        iterator = self._start_readers(tap)
        tap.skip = 0
        if isinstance(iterator, _BaseDataLoaderIter):
            self._untap()
        return iterator

    def _start_readers(self, tap: IndexTap) -> Iterator[Any]:
        """The loader's iterator; worker processes that it starts seed their generators by batch."""
        if not self.loader.num_workers:
            return iter(self.loader)
        assert self._start is not None
        tap.seed = epoch_seed(self._start.rng, self.epoch)
        own = self.loader.worker_init_fn
        self.loader.__dict__["worker_init_fn"] = WorkerStart(own)
        try:
            return iter(self.loader)
        finally:
            self.loader.__dict__["worker_init_fn"] = own

    def _install_tap(self) -> IndexTap:
        """Put a tap before the sampler; worker processes that live on keep the tap they have."""
        living = getattr(self.loader, "_iterator", None)
        known = getattr(living, "_index_sampler", None)
        if isinstance(known, IndexTap):
            return known
        attribute = "batch_sampler" if self.loader._auto_collation else "sampler"
        tap = IndexTap(self.loader.__dict__[attribute])
        # Around DataLoader.__setattr__, which forbids it because users would be misled by it.
        self.loader.__dict__[attribute] = tap
        self._tap = tap
        return tap

    def _untap(self) -> None:
        if self._tap is None:
            return
        for attribute in ("batch_sampler", "sampler"):
            if self.loader.__dict__.get(attribute) is self._tap:
                self.loader.__dict__[attribute] = self._tap.inner
        self._tap = None

    def _reopen(self, cursor: Cursor) -> None:
        """Begin the cursor's epoch as it was begun there, at the cursor's batch."""
        self._start = start = cursor.start
        if start.is_reset and self._is_indexed:
            tap = self._install_tap()
            tap.is_held = True
            self._start_readers(tap)  # draws a base seed that was not drawn there
            tap.is_held = False
        set_epoch(self.loader, self.epoch)
        restore_samplers(self.loader, start.samplers)
        restore_rng(start.rng)
        self._load_state(cursor.state)
        if cursor.is_exhausted:
            # Its state is that of the next epoch already; iterating it now would begin that one.
            self._iterator = Exhausted()
            return
        iterator = self._open(self.fetched)
        if not self._can_seek:
            self._replay(iterator)
        elif self._is_indexed:
            self._prime(iterator)
        elif cursor.samplers is not None:
            settle_order(self.loader, iterator, cursor.samplers)
        self._iterator = iterator

    def _prime(self, iterator: Iterator[Any]) -> None:
        """Make the sampler draw its order now, while the epoch's random state is in place."""
        tap = self._tap or getattr(iterator, "_index_sampler", None)
        if isinstance(tap, IndexTap) and tap.latest is not None:
            tap.latest.prime()

    def _replay(self, iterator: Iterator[Any]) -> None:
        for done in range(self.fetched):
            try:
                next(iterator)
            except StopIteration:
                raise StateMismatch(
                    f"the loader ended after {done} batches where {self.fetched} were handed out"
                ) from None

    def _state(self) -> bytes | None:
        if self._is_stateful and self.fetched:
            return encode_plain(self.loader.state_dict(), "loader.state_dict()")
        if self._has_dataset_state or (self._is_stateful and self._stateful_dataset is not None):
            # Before the first batch the loader is not asked: that would start worker processes.
            state = self._stateful_dataset.state_dict()
            return encode_plain(state, "dataset.state_dict()")
        return None

    def _load_state(self, state: bytes | None) -> None:
        if state is None:
            return
        target = self.loader if self._is_stateful and self.fetched else self._stateful_dataset
        if target is None:
            raise StateMismatch("the dataset has a state where the position comes from, not here")
        target.load_state_dict(decode_plain(state))
