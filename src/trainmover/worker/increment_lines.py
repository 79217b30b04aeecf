"""Updates that are held, by rank: what is kept of one rank is one unbroken line of versions.

Pure: knows versions, not bytes; the simulation runs it too. Decides how many updates are kept,
which of them are promised to a controller, and that attempts that never were leave nothing behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Final, Generic, Protocol, TypeVar

from trainmover.errors import StateMismatch
from trainmover.protocol.carried import Version

IN_FLIGHT: Final = 2
"""Of those kept, the oldest are not promised: the owner may be a gate ahead of who asks."""


class Told(Protocol):
    """One update."""

    @property
    def owner_rank(self) -> int:
        """Whose it is."""

    @property
    def base(self) -> Version:
        """State that it was applied to."""

    @property
    def version(self) -> Version:
        """State behind it."""


U = TypeVar("U", bound=Told)


class Lines(Generic[U]):
    """Updates by rank; `release` is told of each that is not kept any more."""

    def __init__(self, kept: int, release: Callable[[U], None]) -> None:
        self._kept = kept
        self._release = release
        self._lines: dict[int, deque[U]] = {}

    def add(self, update: U) -> None:
        """Keep an update behind those of its rank; one that does not continue them begins anew."""
        line = self._lines.setdefault(update.owner_rank, deque())
        self._cut(line, update.version.step - 1)  # attempts that were undone
        if line and line[-1].version != update.base:
            self._cut(line, -1)
        line.append(update)
        while len(line) > self._kept:
            self._release(line.popleft())

    def void(self, owner_rank: int) -> None:
        """What is held of that rank can't be played."""
        self._cut(self._lines.get(owner_rank, deque()), -1)

    def drop_above(self, step: int, owner_rank: int | None = None) -> None:
        """Forget updates that lead beyond `step`, of one rank or of all: they never were."""
        for rank, line in self._lines.items():
            if owner_rank in (None, rank):
                self._cut(line, step)

    def keep_only(self, ranks: Collection[int]) -> None:
        """Another generation: others are backed up here."""
        for rank in [rank for rank in self._lines if rank not in ranks]:
            self._cut(self._lines.pop(rank), -1)

    def _cut(self, line: deque[U], step: int) -> None:
        while line and line[-1].version.step > step:
            self._release(line.pop())

    # ------------------------------------------------------------------ what is there

    def line(self, owner_rank: int) -> tuple[U, ...]:
        """All that is held of one rank."""
        return tuple(self._lines.get(owner_rank, ()))

    def begin_of(self, owner_rank: int, version: Version) -> Version | None:
        """The oldest version from which an unbroken line leads to `version`, as promised."""
        line = [u for u in self.line(owner_rank) if u.version.step <= version.step]
        if not line or line[-1].version != version:
            return None
        return line[-max(1, self._kept - IN_FLIGHT) :][0].base

    def path(self, owner_rank: int, base: Version, target: Version) -> tuple[U, ...]:
        """Updates that lead from `base` to `target`. Raises StateMismatch."""
        held = self.line(owner_rank)
        found = tuple(u for u in held if base.step < u.version.step <= target.step)
        ends = (found[0].base, found[-1].version) if found else (target, target)
        if ends != (base, target):
            raise StateMismatch(
                f"expected the updates of rank {owner_rank} from step {base.step} to "
                f"{target.step}, have those from {ends[0].step} to {ends[1].step}"
            )
        return found
