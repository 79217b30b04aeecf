"""Notes who reads the rank while `main` builds.

A standby is built as one rank and may be adopted as another. If only objects we can change in
place took the rank (our loader, DistributedSampler, DDP, `job.seed`), the role is changed in
place; else `main` is entered again with the true rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

WATCHED = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")

KNOWN_READERS = (
    "/torch/utils/data/",
    "/torch/nn/parallel/distributed.py",
    "/torch/_dynamo/",
    "/torch/_logging/",
    "/torch/distributed/",
    "/torch/_inductor/",
    "/torch/_functorch/",
    "/torch/optim/",
    "/trainmover/",
)
"""Readers whose use of the rank we can change (samplers) or that keep nothing of it (logging)."""

FROZEN = "<frozen "
"""Python's own `os.environ.get` and `os.getenv`, and copies of the environment: whoever calls them
is the reader."""

BAKING_READERS = ("/torch/distributed/device_mesh.py", "/torch/distributed/tensor/")
"""Readers that derive layout from the rank."""


class RankReads:
    """Places that have read the rank since `begin`."""

    def __init__(self) -> None:
        self._places: list[str] = []
        self._is_open = False

    def begin(self) -> None:
        """`main` is entered."""
        self._places = []
        self._is_open = True

    def end(self) -> None:
        """Building is over: later reads see the rank as it is."""
        self._is_open = False

    def note(self) -> None:
        """The rank is read by somebody up the stack."""
        if not self._is_open:
            return
        place = _reader()
        if place and place not in self._places:
            self._places.append(place)

    def note_place(self, place: str) -> None:
        """Something else bakes the rank in (a sub-group)."""
        if self._is_open and place not in self._places:
            self._places.append(place)

    @property
    def places(self) -> tuple[str, ...]:
        """file:line of each reader outside known objects."""
        return tuple(self._places)


def _reader() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in BAKING_READERS):
            return _script_frame(frame) or f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        is_passed_on = "/trainmover/" in name or name.startswith(FROZEN)
        if not is_passed_on:
            if any(part in name for part in KNOWN_READERS):
                return "" if not _is_plain_getter(name) else _reader_above(frame)
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return ""


def _is_plain_getter(name: str) -> bool:
    """`dist.get_rank()` itself is no reader; who calls it is."""
    return name.endswith(("/distributed_c10d.py", "/c10d_logger.py"))


def _reader_above(frame: Any) -> str:
    while frame is not None and _is_plain_getter(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    if any(part in name for part in BAKING_READERS):
        return _script_frame(frame) or f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
    if any(part in name for part in KNOWN_READERS):
        return ""
    return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"


def _script_frame(frame: Any) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/trainmover/" not in name:
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class NotingEnviron(os._Environ):  # type: ignore[type-arg]
    """`os.environ` that notes reads of the rank's variables."""

    reads: RankReads

    def __getitem__(self, key: str) -> str:
        if key in WATCHED:
            self.reads.note()
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(super().__iter__())


def watch_environment(reads: RankReads) -> None:
    """From now on `os.environ["RANK"]` and the like are noted."""
    NotingEnviron.reads = reads
    os.environ.__class__ = NotingEnviron
