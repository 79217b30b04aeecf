"""Where checkpoints lie: a small protocol, and how a path or URL becomes one of its forms.

Decides what every storage must be able to do. Paths are relative, with `/`; they never leave the
root. Errors are those of `failures`, with the path in them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import unquote, urlparse

from trainmover.checkpoint.failures import Retries
from trainmover.errors import ConfigError

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Output(Protocol):
    """One file being written; it exists under its name from `finish` on, or not at all."""

    def write(self, data: memoryview) -> None:
        """Append `data`."""

    def finish(self) -> None:
        """Flush to the medium and give the file its name."""

    def abandon(self) -> None:
        """Forget the file; never raises."""


class Input(Protocol):
    """One file being read."""

    def read_into(self, position: int, into: memoryview) -> int:
        """Fill `into` from `position` on; the count of bytes, smaller at the end of the file."""

    def close(self) -> None:
        """Give the file back."""


class Space(Protocol):
    """Free space of a storage."""

    @property
    def byte_count(self) -> int:
        """Bytes that this user may still write."""

    @property
    def file_count(self) -> int | None:
        """Files that may still be made; None where there is no such limit."""


class Store(Protocol):
    """A directory of checkpoints on some storage."""

    retries: Retries

    @property
    def location(self) -> str:
        """Path or URL, for people."""

    def exists(self) -> bool:
        """Whether the root is there."""

    def list_folders(self) -> list[str]:
        """Names of real directories below the root, sorted; other things are not looked at."""

    def list_files(self, folder: str) -> dict[str, int]:
        """Regular files of a directory with their sizes; empty if it is not there."""

    def staging(self, name: str) -> str:
        """Directory in which checkpoint `name` is to be written."""

    def make_root(self) -> None:
        """Make the root; nothing happens if it is there."""

    def make_folder(self, folder: str) -> None:
        """Make a directory and its root; nothing happens if it is there."""

    def create(self, path: str) -> Output:
        """Begin a file; what has its name already is replaced when it is finished."""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file: whole and durable on return, or not there."""

    def open(self, path: str) -> Input:
        """Open a file for reading."""

    def read(self, path: str) -> bytes:
        """A small file."""

    def publish(self, folder: str, name: str) -> str:
        """Give a staged checkpoint its name in one move; the name it got."""

    def retire(self, name: str) -> str:
        """Take a directory's name away where that is possible; where it is now."""

    def delete_file(self, path: str, *, is_durable: bool = False) -> None:
        """Remove a file, durably if asked; nothing happens if it is not there."""

    def delete_folder(self, folder: str) -> bool:
        """Remove a directory if it is empty; whether it has gone."""

    def free(self) -> Space | None:
        """What is left; None where nobody can say."""


def open_store(place: str | Path, *, retries: Retries | None = None) -> Store:
    """The store at a path (`/data/run7`, `file:///data/run7`) or URL (`s3://bucket/run7`).

    Raises:
        ConfigError: An unknown scheme, or a library that is missing, named with what to install.
    """
    from trainmover.checkpoint.local_store import LocalStore

    text = str(place)
    if not text:
        raise ConfigError("expected a directory or URL of checkpoints, got an empty one")
    found = _URL.match(text)
    if found is None:
        return LocalStore(Path(text), retries=retries)
    if found.group(1).lower() == "file":
        parts = urlparse(text)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"'{text}': expected file:///PATH, a file URL names no other host")
        return LocalStore(Path(unquote(parts.path)), retries=retries)
    from trainmover.checkpoint.object_store import FsspecStore

    return FsspecStore(text, retries=retries)
