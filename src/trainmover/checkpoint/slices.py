"""Boxes in a tensor's coordinates, and copying the part two of them share.

Decides which runs of bytes go where when a tensor that was cut one way is read another way. Pure:
bytes in, bytes out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from trainmover.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: first element and lengths along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def element_count(self) -> int:
        """Elements inside; 1 for a tensor without dimensions."""
        return prod(self.shape)

    def shared(self, other: Box) -> Box | None:
        """The part that lies in both; None where it is empty."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - first for first, end in zip(begin, ends, strict=True))
        return None if any(length <= 0 for length in shape) else Box(begin, shape)


def check_inside(box: Box, global_shape: Sequence[int], name: str) -> None:
    """Raises LayoutMismatch, naming the tensor, unless `box` lies within it."""
    fits = len(box.shape) == len(box.offset) == len(global_shape) and all(
        first >= 0 and length >= 0 and first + length <= whole
        for first, length, whole in zip(box.offset, box.shape, global_shape, strict=True)
    )
    if not fits:
        raise LayoutMismatch(
            f"{name}: {box.shape} at {box.offset} was asked for, the whole is {tuple(global_shape)}"
        )


def runs(part: Box, source: Box, target: Box) -> Iterator[tuple[int, int, int]]:
    """First element in `source`, first in `target`, and count, of each contiguous run of `part`.

    Row-major. Dimensions that all three fill completely are merged with the one before them.
    """
    depth = len(part.shape)
    count, inner = 1, depth
    while inner > 0:
        count *= part.shape[inner - 1]
        inner -= 1
        if not part.shape[inner] == source.shape[inner] == target.shape[inner]:
            break
    from_strides, to_strides = _strides(source.shape), _strides(target.shape)
    first_from = _position(part.offset, source.offset, from_strides)
    first_to = _position(part.offset, target.offset, to_strides)
    for index in itertools.product(*(range(length) for length in part.shape[:inner])):
        yield (
            first_from + sum(i * s for i, s in zip(index, from_strides, strict=False)),
            first_to + sum(i * s for i, s in zip(index, to_strides, strict=False)),
            count,
        )


def copy_shared(
    source: Box, data: memoryview, target: Box, into: memoryview, element_bytes: int
) -> int:
    """Copy what both boxes share from `data` to `into`; the count of elements."""
    part = source.shared(target)
    if part is None:
        return 0
    for start, goal, count in runs(part, source, target):
        length = count * element_bytes
        first, place = start * element_bytes, goal * element_bytes
        into[place : place + length] = data[first : first + length]
    return part.element_count


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension + 1]
    return strides


def _position(at: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((a - o) * s for a, o, s in zip(at, origin, strides, strict=True))
