"""Snapshots in an agent's memory: those of its own workers and those of other machines.

Decides what is kept, what a worker may overwrite (the hold word of each own image) and what is
called gone: an image that the worker has begun to overwrite is not listed, sent or written any
more. Which versions are needed is the controller's to say.

Own images are the worker's memory, mapped here, so they outlive the worker; peers' are ours.
Methods may be called on any thread.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from trainmover.errors import StateMismatch
from trainmover.protocol.carried import Version
from trainmover.protocol.messages import SnapshotHeld, SnapshotTaken
from trainmover.protocol.snapshot_image import (
    FREE,
    OLDEST,
    WAITING,
    WRITING,
    ImageDescription,
    SnapshotImage,
    bulk_digest,
)

SPARE_BUFFERS: Final = 2
"""Memory of dropped copies that is kept for the next ones: its pages are there already."""


@dataclass
class Kept:
    """One image."""

    kind: Literal["own", "peer"]
    image: SnapshotImage
    description: ImageDescription
    size_bytes: int
    sequence: int
    """Of the image when it was opened: another number, another image."""
    memory: mmap.mmap
    file_id: tuple[int, int] = (0, 0)
    bulk_digest: int = 0
    level: int = 0
    readers: int = 0
    """Whoever sends or writes it at present: it is not dropped under their hands."""
    writers: int = 0
    """Those of them that write it to storage, which may take long."""

    @property
    def rank(self) -> int:
        """Whose state it is."""
        return self.description.rank

    @property
    def version(self) -> Version:
        """Of the state."""
        return self.description.version

    @property
    def identity(self) -> str:
        """Of the bulk state."""
        return self.description.identity

    @property
    def is_suspect(self) -> bool:
        """Whether the loss was not finite."""
        return self.description.is_suspect

    @property
    def is_unchanged(self) -> bool:
        """Whether this memory still holds this image."""
        return self.image.sequence == self.sequence

    def whole(self) -> memoryview:
        """Header, bulk and description."""
        return self.image.memory[: self.size_bytes]

    def bulk(self) -> memoryview:
        """The bulk bytes."""
        return self.image.bulk(self.description.bulk_bytes)

    def told(self) -> SnapshotHeld:
        """For the controller."""
        return SnapshotHeld(
            rank=self.rank,
            version=self.version,
            identity=self.identity,
            kind=self.kind,
            size_bytes=self.size_bytes,
            bulk_digest=self.bulk_digest,
            is_suspect=self.is_suspect,
        )


class SnapshotStore:
    """All images of one agent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own: dict[tuple[int, Version], Kept] = {}
        self._peers: dict[tuple[int, Version], Kept] = {}
        self._spare: list[mmap.mmap] = []
        self._void: frozenset[Version] = frozenset()
        self._oldest = Version(step=0)

    # ------------------------------------------------------------------ taking in

    def open_own(self, taken: SnapshotTaken) -> Kept:
        """Map what a worker has just written. Raises StateMismatch, OSError."""
        fd = os.open(taken.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            memory = mmap.mmap(fd, found.st_size)
        finally:
            os.close(fd)
        image = SnapshotImage(memory)
        sequence = image.sequence
        description = image.read_description()
        if (description.rank, description.version) != (taken.rank, taken.version):
            raise StateMismatch(
                f"a snapshot of rank {taken.rank} at {taken.version} was announced, "
                f"{taken.path} holds rank {description.rank} at {description.version}"
            )
        kept = Kept(
            kind="own",
            image=image,
            description=description,
            size_bytes=image.total_bytes,
            sequence=sequence,
            memory=memory,
            file_id=(found.st_dev, found.st_ino),
            bulk_digest=taken.bulk_digest,
            level=taken.level,
        )
        with self._lock:
            if not self._is_needed(kept.version):
                image.set_hold(FREE)
                return kept
            for key in [k for k, old in self._own.items() if old.file_id == kept.file_id]:
                del self._own[key]
            self._own[kept.rank, kept.version] = kept
            self._set_holds()
        return kept

    def check(self, kept: Kept) -> bool:
        """Take the digest of an own image; False where it was overwritten meanwhile."""
        digest = bulk_digest(kept.bulk(), kept.description.entries)
        if not kept.is_unchanged:
            self._forget_changed()
            return False
        kept.bulk_digest = digest
        return True

    def reserve(self, size: int) -> mmap.mmap:
        """Memory for a peer's image of `size` bytes."""
        with self._lock:
            for memory in self._spare:
                if len(memory) >= size:
                    self._spare.remove(memory)
                    return memory
        fd = os.memfd_create("trainmover-backup", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def give_back(self, memory: mmap.mmap) -> None:
        """Memory that `reserve` gave and nobody needs."""
        with self._lock:
            self._recycle(memory)

    def add_peer(self, memory: mmap.mmap, digest: int) -> Kept:
        """Keep a peer's image that has arrived whole. Raises StateMismatch."""
        image = SnapshotImage(memory)
        description = image.read_description()
        bulk = image.bulk(description.bulk_bytes)
        if bulk_digest(bulk, description.entries) != digest:
            raise StateMismatch(f"the copy of rank {description.rank} has another digest")
        kept = Kept(
            kind="peer",
            image=image,
            description=description,
            size_bytes=image.total_bytes,
            sequence=image.sequence,
            memory=memory,
            bulk_digest=digest,
        )
        with self._lock:
            if self._is_needed(kept.version):
                self._peers[kept.rank, kept.version] = kept
            else:
                self._recycle(memory)
        return kept

    # ------------------------------------------------------------------ looking

    def newest_own(self) -> list[Kept]:
        """Per rank, the newest own image whose digest is known."""
        newest: dict[int, Kept] = {}
        with self._lock:
            for kept in self._own.values():
                before = newest.get(kept.rank)
                is_known = kept.bulk_digest != 0 and kept.is_unchanged
                if is_known and (before is None or before.version < kept.version):
                    newest[kept.rank] = kept
        return [newest[rank] for rank in sorted(newest)]

    def is_wanted(self, rank: int, version: Version) -> bool:
        """Whether a peer's copy of this would be kept and is not here yet."""
        with self._lock:
            return self._is_needed(version) and (rank, version) not in self._peers

    def is_needed(self, version: Version) -> bool:
        """Whether anybody may still go back to it, as far as was said."""
        with self._lock:
            return self._is_needed(version)

    def told(self) -> tuple[SnapshotHeld, ...]:
        """Everything whole whose digest is known, for the controller."""
        with self._lock:
            kept = [*self._own.values(), *self._peers.values()]
        known = [item for item in kept if item.is_unchanged and item.bulk_digest]
        return tuple(item.told() for item in sorted(known, key=lambda i: (i.version, i.rank)))

    # ------------------------------------------------------------------ letting go

    def drop(self, oldest: Version, void: tuple[Version, ...]) -> None:
        """Versions below `oldest`, and those of a time line that was rolled back, are not needed;
        an image that is being written to storage stays until it is written."""
        with self._lock:
            self._oldest = max(self._oldest, oldest)
            self._void = frozenset(v for v in (*self._void, *void) if v >= self._oldest)
            self._drop_unneeded()

    @contextmanager
    def reading(
        self, rank: int, version: Version, *, is_for_storage: bool = False
    ) -> Iterator[Kept]:
        """An image that is not dropped meanwhile; whether its worker has overwritten it, its
        `is_unchanged` says. Raises StateMismatch where it is not here."""
        with self._lock:
            kept = self._find(rank, version)
            if kept is None:
                raise StateMismatch(f"no whole snapshot of rank {rank} at {version} is held here")
            kept.readers += 1
            kept.writers += int(is_for_storage)
            self._set_holds()
        try:
            yield kept
        finally:
            with self._lock:
                kept.readers -= 1
                kept.writers -= int(is_for_storage)
                self._drop_unneeded()

    def close(self) -> None:
        """Let go of everything; workers that live on may use their memory again."""
        with self._lock:
            for kept in self._own.values():
                if kept.is_unchanged:
                    kept.image.set_hold(FREE)
            self._own.clear()
            self._peers.clear()
            self._spare.clear()

    # ------------------------------------------------------------------ under the lock

    def _find(self, rank: int, version: Version) -> Kept | None:
        for held in (self._own, self._peers):
            kept = held.get((rank, version))
            if kept is not None and kept.is_unchanged:
                return kept
        return None

    def _is_needed(self, version: Version) -> bool:
        return version >= self._oldest and version not in self._void

    def _drop_unneeded(self) -> None:
        for held in (self._own, self._peers):
            for key, kept in list(held.items()):
                if self._is_needed(kept.version) or kept.readers:
                    continue
                del held[key]
                if kept.kind == "own" and kept.is_unchanged:
                    kept.image.set_hold(FREE)
                elif kept.kind == "peer":
                    self._recycle(kept.memory)
        self._set_holds()

    def _recycle(self, memory: mmap.mmap) -> None:
        if len(self._spare) < SPARE_BUFFERS:
            self._spare.append(memory)

    def _set_holds(self) -> None:
        seen: set[int] = set()
        for _, kept in sorted(self._own.items(), key=lambda item: item[1].version):
            if not kept.is_unchanged:
                continue
            hold = OLDEST if kept.rank not in seen else WAITING
            seen.add(kept.rank)
            kept.image.set_hold(WRITING if kept.writers else hold)

    def _forget_changed(self) -> None:
        with self._lock:
            for key in [key for key, kept in self._own.items() if not kept.is_unchanged]:
                del self._own[key]
            self._set_holds()
