"""Notes who reads the rank in front of `main` and while it builds.

A standby is built as one rank and may be adopted as another. If only objects we can change in
place took the rank (our loader, DistributedSampler, DDP, `job.seed`), the role is changed in
place; else `main` is entered again with the true rank. What the script itself has read in front of
`main` lies in its globals: there the whole script runs again.
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

BAKING_READERS = (
    "/torch/distributed/device_mesh.py",
    "/torch/distributed/tensor/",
    "/torch/distributed/optim/",
    "/torch/distributed/fsdp/",
)
"""Readers that derive layout from the rank: which shards of parameters or optimizer state are
here."""


INSTALLED = ("/site-packages/", "/dist-packages/")
IMPORTING = "<frozen importlib"


class RankReads:
    """Places that have read the rank since `begin_script` and since `begin`."""

    def __init__(self) -> None:
        self._in_script: list[str] = []
        self._in_main: list[str] = []
        self._places: list[str] | None = None
        """The list that is open; None: reads see the rank as it is."""

    def begin_script(self) -> None:
        """The script starts at its first line."""
        self._places = self._in_script = []

    def begin(self) -> None:
        """`main` is entered."""
        self._places = self._in_main = []

    def end(self) -> None:
        """Building is over: later reads see the rank as it is."""
        self._places = None

    def note(self) -> None:
        """The rank is read by somebody up the stack."""
        if self._places is not None and (path := _reader()):
            self.note_place(path)

    def note_place(self, place: str) -> None:
        """Something else bakes the rank in (a sub-group)."""
        if self._places is not None and place not in self._places:
            self._places.append(place)

    @property
    def places(self) -> tuple[str, ...]:
        """file:line of each reader outside known objects, without folders."""
        return tuple(_short(path) for path in (*self._in_script, *self._in_main))

    @property
    def in_script(self) -> tuple[str, ...]:
        """path:line of each reader in front of `main`."""
        return tuple(self._in_script)


def _short(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _reader() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in BAKING_READERS):
            return _script_frame(frame) or f"{name}:{frame.f_lineno}"
        is_passed_on = "/trainmover/" in name or name.startswith(FROZEN)
        if not is_passed_on:
            if any(part in name for part in KNOWN_READERS):
                return "" if not _is_plain_getter(name) else _reader_above(frame)
            return "" if _is_importing(frame) else f"{name}:{frame.f_lineno}"
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
        return _script_frame(frame) or f"{name}:{frame.f_lineno}"
    if any(part in name for part in KNOWN_READERS):
        return ""
    return f"{name}:{frame.f_lineno}"


def _is_importing(frame: Any) -> bool:
    """Whether an installed library reads while it is imported, as it is once in a process.

    Nothing that runs again would change that. The compiler imports such libraries on its first
    graph (networkx copies the whole environment), which says nothing about the script.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(IMPORTING):
            return True
        if not name.startswith(FROZEN) and not any(part in name for part in INSTALLED):
            return False
        frame = frame.f_back
    return False


def _script_frame(frame: Any) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and "/trainmover/" not in name:
            return f"{name}:{frame.f_lineno}"
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
