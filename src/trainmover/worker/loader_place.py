"""A place between two batches of a loader, as it travels and as it lies in checkpoints.

Decides what belongs to a place, and by what other data is noticed. How to get there is decided in
`loader_source`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import xxhash

from trainmover.worker.loader_shares import Layout, Share

_DEPTH: Final = 3
_NAMES_MAX: Final = 1_000_000
_NAME_LENGTH: Final = 1024
_MASK: Final = (1 << 63) - 1


class EpochStart(msgspec.Struct, frozen=True, array_like=True):
    """What determines the order of an epoch, taken before its iterator was made."""

    rng: bytes
    samplers: bytes
    is_reset: bool
    """Whether living worker processes were re-used; then no base seed was drawn."""
    shares: tuple[Share, ...] = ()
    """What others had read of the epoch before it was dealt out anew, oldest first."""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A place between two batches of a loader."""

    epoch: int
    fetched: int
    """Batches fetched in this epoch (or in what was left of it when it was dealt out anew); 0
    means that it has not begun."""
    start: EpochStart
    state: bytes | None
    """Encoded state of the loader or of its dataset, where they have one."""
    length: int | None
    """Batches in an epoch, where known: a cheap check that the data is the same."""
    samplers: bytes | None = None
    """State of the samplers' generators now, for loaders that do not draw the same on resuming."""
    is_exhausted: bool = False
    """Whether an iterable dataset has ended already, though the epoch was not seen to."""
    layout: Layout | None = None
    """How ranks share the epoch, where that is known; else it can't be dealt out anew."""
    data: int = 0
    """Digest of the names the dataset reads from, in their order; 0: it holds no such list."""


def names_digest(dataset: Any) -> int:
    """63-bit digest of the lists of file names that a dataset holds; 0 if it holds none.

    A position counts samples, and directory listings come in different order on different
    machines. Names count as they stand below what all of a list have in common, so the data may
    lie somewhere else.
    """
    digest = xxhash.xxh3_64()
    has_any = False
    for name, values in _lists_of(dataset, "", 0):
        has_any = True
        digest.update(f"{name} {len(values)}\n".encode())
        start = _common_folder(values)
        for value in values:
            digest.update(os.fspath(value)[start:].encode("utf-8", "surrogateescape") + b"\n")
    return digest.intdigest() & _MASK if has_any else 0


def _lists_of(holder: Any, path: str, depth: int) -> Iterator[tuple[str, Sequence[Any]]]:
    attributes = getattr(holder, "__dict__", None)
    if depth >= _DEPTH or not isinstance(attributes, dict):
        return
    for name, value in sorted(attributes.items()):
        if name == "dataset":
            yield from _lists_of(value, f"{path}{name}.", depth + 1)
        elif name == "datasets" and isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                yield from _lists_of(inner, f"{path}{name}[{index}].", depth + 1)
        elif _are_names(value):
            yield f"{path}{name}", value


def _are_names(value: Any) -> bool:
    """Whether a list can be one of file names: no texts, of which a dataset may hold millions."""
    if type(value) not in (list, tuple) or not 1 < len(value) <= _NAMES_MAX:
        return False
    return all(
        isinstance(one, os.PathLike)
        or (isinstance(one, str) and len(one) <= _NAME_LENGTH and "\n" not in one)
        for one in value
    )


def _common_folder(values: Sequence[Any]) -> int:
    """Length of the path that all names begin with: what differs where data lies elsewhere."""
    low, high = min(map(os.fspath, values)), max(map(os.fspath, values))
    pairs = enumerate(zip(low, high, strict=False))
    common = next(
        (place for place, (one, other) in pairs if one != other), min(len(low), len(high))
    )
    return low[:common].rfind("/") + 1
