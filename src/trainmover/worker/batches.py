"""What `job.batches` returns: an endless iterator whose hand-outs can be undone and moved.

Decides which batch is handed out next: a new one, or, after an undone step, the same ones again.
A batch whose reading drew random numbers brings the generators along on its second hand-out, so
that what follows in the step sees the same numbers as without the interruption. Where loaders
stand and how to get there again is decided in `loader_source` and `call_source`.

Called on: the training thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from trainmover.errors import StateMismatch, TrackError
from trainmover.state.rng import capture_host_rng, preserved_rng, restore_rng
from trainmover.worker.call_source import CallCursor, CallSource
from trainmover.worker.handout import Handout
from trainmover.worker.loader_place import Cursor
from trainmover.worker.loader_source import POLICIES, LoaderSource
from trainmover.worker.sampler_state import RankChange

_LOADER: Final = 1
_CALL: Final = 2


class _LoaderPosition(msgspec.Struct, frozen=True, array_like=True, tag=_LOADER):
    epoch: int
    handed_out: int
    cursor: Cursor


class _CallPosition(msgspec.Struct, frozen=True, array_like=True, tag=_CALL):
    handed_out: int
    cursor: CallCursor
    ahead: list[tuple[bytes, CallCursor]]
    """Random state and place from which each batch was made that waits to be handed out."""


_decoder: Final = msgspec.msgpack.Decoder(_LoaderPosition | _CallPosition)
_encoder: Final = msgspec.msgpack.Encoder()
_OTHER_KIND: Final = "a loader's position was given to a callable, or the reverse"


def _decoded(position: bytes) -> _LoaderPosition | _CallPosition:
    try:
        return _decoder.decode(position)
    except msgspec.MsgspecError as problem:
        raise StateMismatch(f"a loader position can't be decoded: {problem}") from problem


@dataclass
class _Fetched:
    """One batch as it came from the source, with what is needed to have it again."""

    handout: Handout
    cursor: Any
    before: bytes
    after: bytes | None
    """Random state behind the reading; None if it drew nothing."""
    epoch: int
    index: int


class Batches:
    """Endless iterator over a loader or callable, with undo and a position that can be moved.

    Attributes:
        source: What was given to `job.batches`.
        epoch: Epoch of the batch handed out last; 0 before.
        handed_out: Batches handed out in that epoch.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Any],
        *,
        prefetch: int = 0,
        on_missing_state: str = "error",
        copy: bool = False,
    ) -> None:
        """Track a loader or callable.

        Args:
            source: A DataLoader, any re-iterable with `state_dict`, or a callable that returns
                a batch.
            prefetch: Batches a callable is asked for ahead of their use.
            on_missing_state: For loaders without a position: `error`, `replay` (read and drop as
                many batches on a joiner) or `restart` (begin the epoch again).
            copy: Hand out copies of tensors, for scripts that change batches in place.
        Raises:
            TrackError: The source has no position that can be captured.
        """
        if on_missing_state not in POLICIES:
            raise TrackError(
                f"on_missing_state={on_missing_state!r}: expected one of {', '.join(POLICIES)}"
            )
        self.source = source
        self.epoch = 0
        self.handed_out = 0
        self._copies_tensors = copy
        self._prefetch = prefetch
        self._reader = self._reader_of(source, on_missing_state)
        self._ahead: deque[_Fetched] = deque()
        self._replay: deque[_Fetched] = deque()
        self._attempt: list[_Fetched] = []
        self._ahead_at_begin: tuple[_Fetched, ...] = ()
        self._counts_at_begin = (0, 0)
        self._has_attempts = False

    def _reader_of(self, source: Any, on_missing_state: str) -> LoaderSource | CallSource:
        is_iterable = hasattr(source, "__iter__")
        if isinstance(source, Iterator):
            raise TrackError(
                f"job.batches got a {type(source).__name__}, which can be read only once: give it "
                "the loader, not iter(loader)"
            )
        if not is_iterable and callable(source):
            return CallSource(source)
        if not is_iterable:
            raise TrackError(
                f"job.batches got a {type(source).__name__}; it takes a DataLoader or a callable"
            )
        if self._prefetch:
            raise TrackError(
                "prefetch= is for callables; a DataLoader reads ahead by itself "
                "(num_workers and prefetch_factor)"
            )
        return LoaderSource(source, on_missing_state)

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        length = self._reader.length if isinstance(self._reader, LoaderSource) else None
        if length is None:
            raise TypeError(f"{type(self.source).__name__} has no length")
        return length

    def __next__(self) -> Any:
        while len(self._ahead) < self._prefetch:
            self._ahead.append(self._obtain())
        self._ahead.append(self._obtain())
        fetched = self._ahead.popleft()
        self.epoch = fetched.epoch
        self.handed_out = fetched.index + 1
        return fetched.handout.give(is_remembered=self._has_attempts)

    def _obtain(self) -> _Fetched:
        """The next batch of this attempt: one of the undone attempt again, or a new one."""
        if self._replay:
            kept = self._replay.popleft()
            if kept.after is None or kept.before == capture_host_rng():
                if kept.after is not None:
                    restore_rng(kept.after)
                self._attempt.append(kept)
                return kept
            # The interrupted attempt had drawn other numbers by now (it ran on invented values):
            # read again from here, as an undisturbed step would.
            self._replay.clear()
            self._reader.seek(kept.cursor)
        fetched = self._fetch()
        if self._has_attempts:
            self._attempt.append(fetched)
        return fetched

    def _fetch(self) -> _Fetched:
        reader = self._reader
        cursor = reader.mark()
        # A batch that waits ahead needs its random state for `position`, undo or not.
        is_watched = self._has_attempts or self._prefetch > 0
        if isinstance(reader, LoaderSource):
            is_watched = is_watched and reader.may_draw
        before = capture_host_rng() if is_watched else b""
        batch = reader.fetch()
        after = capture_host_rng() if is_watched else b""
        if isinstance(reader, LoaderSource):
            epoch, index = reader.epoch, reader.fetched - 1
        else:
            assert isinstance(cursor, CallCursor)
            epoch, index = 0, cursor.calls
        handout = Handout(batch, copies_tensors=self._copies_tensors)
        return _Fetched(handout, cursor, before, None if after == before else after, epoch, index)

    def of_attempt(self) -> list[Any]:
        """Batches handed out since `begin_attempt`, as they are now (changes in place show)."""
        return [fetched.handout.batch for fetched in self._attempt]

    def begin_attempt(self) -> None:
        """From now on batches belong to this attempt; earlier ones are given up."""
        self._has_attempts = True
        self._attempt = []
        self._ahead_at_begin = tuple(self._ahead)
        self._counts_at_begin = (self.epoch, self.handed_out)

    def rewind(self) -> None:
        """Undo: the batches of this attempt are handed out again, the very same objects.

        The caller restores the random state of the attempt's start.
        """
        self._replay = deque([*self._attempt, *self._replay])
        self._attempt = []
        self._ahead = deque(self._ahead_at_begin)
        self.epoch, self.handed_out = self._counts_at_begin

    def position(self) -> bytes:
        """Where the next batch comes from, for another machine."""
        cursor = self._replay[0].cursor if self._replay else self._reader.mark()
        if isinstance(cursor, Cursor):
            return _encoder.encode(_LoaderPosition(self.epoch, self.handed_out, cursor))
        ahead = [(fetched.before, fetched.cursor) for fetched in self._ahead]
        return _encoder.encode(_CallPosition(self.handed_out, cursor, ahead))

    def restore(self, position: bytes) -> None:
        """Go to a position taken on another machine; the global generators stay as they are.

        Raises:
            StateMismatch: The position is of another kind of source or of other data.
        """
        place = _decoded(position)
        reader = self._reader
        self._ahead.clear()
        self._replay.clear()
        if isinstance(place, _LoaderPosition) and isinstance(reader, LoaderSource):
            reader.seek(place.cursor)
            self.epoch = place.epoch
        elif isinstance(place, _CallPosition) and isinstance(reader, CallSource):
            self._restore_ahead(place, reader)
        else:
            raise StateMismatch(_OTHER_KIND)
        self.handed_out = place.handed_out
        self._attempt = []
        self._ahead_at_begin = tuple(self._ahead)
        self._counts_at_begin = (self.epoch, self.handed_out)

    def share_out(self, positions: Sequence[bytes], rank: int, world_size: int) -> None:
        """Go on where another number of ranks have left off; the global generators are not touched.

        Args:
            positions: Of this loader on every rank there, by rank.
            rank: This one.
            world_size: Number of ranks here.
        Raises:
            StateMismatch: It can't be said who is to read what; the message names the loader.
        """
        places = [_decoded(position) for position in positions]
        self._ahead.clear()
        self._replay.clear()
        reader = self._reader
        with preserved_rng():
            if isinstance(reader, LoaderSource):
                cursors = [one.cursor for one in places if isinstance(one, _LoaderPosition)]
                if len(cursors) < len(places):
                    raise StateMismatch(_OTHER_KIND)
                reader.share_out(cursors, rank, world_size)
                self.epoch, self.handed_out = reader.epoch, reader.fetched
            else:
                calls = [one for one in places if isinstance(one, _CallPosition)]
                if len(calls) < len(places):
                    raise StateMismatch(_OTHER_KIND)
                reader.share_out([one.cursor for one in calls], rank, world_size)
                self.handed_out = calls[0].handed_out
        self._attempt = []
        self._ahead_at_begin = ()
        self._counts_at_begin = (self.epoch, self.handed_out)

    def _restore_ahead(self, place: _CallPosition, reader: CallSource) -> None:
        with preserved_rng():
            for rng, cursor in place.ahead:
                reader.seek(cursor)
                restore_rng(rng)
                self._ahead.append(self._fetch())
        reader.seek(place.cursor)

    def set_rank(self, rank: int, before: int | None = None, world_size: int | None = None) -> bool:
        """Read another rank's part from here on, where it was `before`'s of `world_size`.

        Returns:
            False if a rank is, or may be, held by something whose meaning is not known.
        """
        if isinstance(self._reader, CallSource):
            return True
        return self._reader.set_rank(RankChange(rank, before, world_size))

    def warm(self) -> None:
        """Read one batch and forget it, so that the first real one is not the first ever.

        Position, random state and samplers are afterwards what they were; nothing happens where
        batches were read already.
        """
        if self._attempt or self._replay or self._ahead or self.handed_out:
            return
        with preserved_rng():
            place = self._reader.mark()
            self._reader.fetch()
            if isinstance(place, CallCursor):
                assert isinstance(self._reader, CallSource)
                self._reader.seek(place)
            else:
                assert isinstance(self._reader, LoaderSource)
                self._reader.seek(place)

    def close(self) -> None:
        """Shut loader worker processes down. The next batch starts them again."""
        if isinstance(self._reader, LoaderSource):
            self._reader.close()
