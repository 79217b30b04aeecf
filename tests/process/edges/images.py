"""Images for tests, made as a worker makes them, without torch."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from trainmover.protocol.messages import SnapshotTaken, Version
from trainmover.protocol.snapshot_image import (
    HEADER_BYTES,
    WAITING,
    ImageDescription,
    ImageEntry,
    SnapshotImage,
    aligned,
    encode_description,
)


@dataclass
class Memory:
    """One slot of a worker."""

    fd: int
    image: SnapshotImage

    def close(self) -> None:
        os.close(self.fd)


def new_memory(size: int = 1 << 20) -> Memory:
    fd = os.memfd_create("test-image", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return Memory(fd, SnapshotImage(mmap.mmap(fd, size)))


def write(memory: Memory, rank: int, step: int, content: bytes, lineage: int = 1) -> SnapshotTaken:
    """Take a snapshot of two tensors with that content."""
    half = len(content) // 2
    second = aligned(half)
    entries = (
        entry("first", 0, half),
        entry("second", second, len(content) - half),
    )
    bulk_bytes = second + len(content) - half
    memory.image.begin()
    memory.image.set_hold(WAITING)
    bulk = memory.image.memory[HEADER_BYTES : HEADER_BYTES + bulk_bytes]
    bulk[:half] = content[:half]
    bulk[second:] = content[half:]
    description = ImageDescription(
        rank=rank,
        world_size=2,
        version=Version(step=step, lineage=lineage),
        generation=1,
        identity=f"identity {rank}",
        run_id="run",
        bulk_bytes=bulk_bytes,
        entries=entries,
        personal=b"own",
        shared=b"shared",
    )
    size = memory.image.finish(encode_description(description), bulk_bytes)
    return SnapshotTaken(
        incarnation=f"w{rank}",
        rank=rank,
        version=description.version,
        generation=1,
        identity=description.identity,
        path=f"/proc/{os.getpid()}/fd/{memory.fd}",
        size_bytes=size,
        bulk_digest=0,
        blocked_s=0.0,
        level=1,
    )


def entry(name: str, offset: int, size: int) -> ImageEntry:
    return ImageEntry(
        name=name,
        kind="parameter",
        dtype="uint8",
        shape=(size,),
        offset=offset,
        size_bytes=size,
        global_shape=(size,),
        global_offset=(0,),
    )
