"""Payloads between two workers of one machine: a ring of memory per direction.

Decides where a payload lies in the ring. Nothing is synchronised through the memory itself:
headers that announce a payload and frames that return its space travel in the channel's socket,
whose order is all the ordering needed. Whether two workers may share memory is the handshake's
decision (equal machine names only: machines that are played by processes never do).
"""

from __future__ import annotations

import mmap
import os
import stat

import torch

from trainmover.errors import TransportError

ALIGNMENT = 64


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class Ring:
    """One direction's memory."""

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size = size


class Offer:
    """This side's outgoing ring, before the peer has opened it."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("trainmover-ring", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.ring = Ring(self._fd, size)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Drop the descriptor; the mapping lives on."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def take(path: str, size: int) -> Ring:
    """The peer's outgoing ring.

    Raises:
        TransportError: It can't be opened here, or is not what a ring looks like.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"shared memory at {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise TransportError(f"shared memory at {path} is not a ring of {size} bytes")
        return Ring(fd, size)
    finally:
        os.close(fd)


class RingPair:
    """Both directions of one channel."""

    def __init__(self, out: Ring, into: Ring) -> None:
        self._out = out
        self._into = into
        self._head = 0
        self._free = out.size
        self._tail = 0
        self._unreported = 0

    def put(self, payload: memoryview | bytes) -> bool:
        """Copy a payload behind the last one; False where there is no space."""
        at, cost = self._place(self._head, len(payload), self._out.size)
        if cost > self._free:
            return False
        self._out.memory[at : at + len(payload)].copy_(torch.frombuffer(payload, dtype=torch.uint8))
        self._head += cost
        self._free -= cost
        return True

    def credit(self, count: int) -> None:
        """The peer returned space."""
        self._free += count

    def peek(self, length: int) -> torch.Tensor:
        """The next payload, in place."""
        at, _ = self._place(self._tail, length, self._into.size)
        return self._into.memory[at : at + length]

    def skip(self, length: int) -> int:
        """Free the payload just read; bytes to return to the peer now (often 0)."""
        _, cost = self._place(self._tail, length, self._into.size)
        self._tail += cost
        self._unreported += cost
        if self._unreported < self._into.size // 4:
            return 0
        credit, self._unreported = self._unreported, 0
        return credit

    @staticmethod
    def _place(position: int, length: int, size: int) -> tuple[int, int]:
        """(offset, bytes used up) of a payload: never across the end."""
        at = position % size
        wasted = size - at if at + length > size else 0
        return (0 if wasted else at), wasted + _aligned(length)
