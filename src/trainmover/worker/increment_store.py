"""Increments that this process holds: those of the ranks it backs up, and its own.

Own ones are kept for whoever backs this rank up after its backup is lost. Decides only that memory
is used again and again; which updates are kept is decided by `increment_lines`. The I/O thread, the
main thread and threads that serve call it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from trainmover.protocol.messages import Version
from trainmover.state.increment import Block, IncrementHead
from trainmover.worker.increment_lines import Lines

SPARE_BLOCKS: Final = 4


@dataclass(frozen=True)
class Increment:
    """One update and where its gradients are."""

    head: IncrementHead
    block: Block | None
    """None: a step without an update."""

    @property
    def owner_rank(self) -> int:
        """Whose it is."""
        return self.head.owner_rank

    @property
    def base(self) -> Version:
        """State that it was applied to."""
        return self.head.base

    @property
    def version(self) -> Version:
        """State behind it."""
        return self.head.version

    @property
    def bulk(self) -> memoryview:
        """The gradients' bytes."""
        if self.block is None:
            return memoryview(b"")
        return self.block.memory[: self.head.bulk_bytes]


class IncrementStore:
    """Lines of increments by rank."""

    def __init__(self, kept: int) -> None:
        self._lines: Lines[Increment] = Lines(kept, lambda update: self._recycle(update.block))
        self._spare: list[Block] = []
        self._lock = threading.RLock()

    def reserve(self, size: int) -> Block:
        """Memory for one increment's gradients."""
        with self._lock:
            for block in self._spare:
                if size <= len(block.memory) <= 2 * size:
                    self._spare.remove(block)
                    return block
        return Block(size)

    def give_back(self, block: Block | None) -> None:
        """Memory that nobody needs."""
        with self._lock:
            self._recycle(block)

    def _recycle(self, block: Block | None) -> None:
        if block is not None:
            self._spare.append(block)
            del self._spare[:-SPARE_BLOCKS]

    def add(self, increment: Increment) -> None:
        """Keep an update behind those of its rank."""
        with self._lock:
            self._lines.add(increment)

    def void(self, owner_rank: int) -> None:
        """What is held of that rank can't be played."""
        with self._lock:
            self._lines.void(owner_rank)

    def begin_of(self, owner_rank: int, version: Version) -> Version | None:
        """The oldest version from which an unbroken line leads to `version`."""
        with self._lock:
            return self._lines.begin_of(owner_rank, version)

    def path(self, owner_rank: int, base: Version, target: Version) -> tuple[Increment, ...]:
        """Updates that lead from `base` to `target`. Raises StateMismatch."""
        with self._lock:
            return self._lines.path(owner_rank, base, target)

    def line(self, owner_rank: int) -> tuple[Increment, ...]:
        """All that is held of one rank."""
        with self._lock:
            return self._lines.line(owner_rank)

    def drop_above(self, step: int, owner_rank: int | None = None) -> None:
        """Forget updates that lead beyond `step`, of one rank or of all: they never were."""
        with self._lock:
            self._lines.drop_above(step, owner_rank)

    def keep_only(self, ranks: Collection[int]) -> None:
        """Another generation: others are backed up here."""
        with self._lock:
            self._lines.keep_only(ranks)
