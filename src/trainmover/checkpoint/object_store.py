"""A store behind fsspec: S3-compatible and other object stores, or memory for tests.

Decides how the commit works where nothing can be renamed: the objects of a checkpoint are written
under their final names first, the manifest last, in one put. A reader that finds no manifest finds
nothing. fsspec, and what it needs for a scheme, is installed with the extra `object-storage`.

Listings and whole objects only; what an upload of several parts leaves behind when the process is
killed is the bucket's life-cycle rule to remove.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from trainmover.checkpoint import names
from trainmover.checkpoint.failures import Retries, named, retrying
from trainmover.errors import ConfigError

FLAT: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "oss", "r2"})
"""Schemes without directories: making one would look for, or make, the bucket."""


class ObjectOutput:
    """An object being uploaded; it exists from `finish` on."""

    def __init__(self, system: Any, path: str) -> None:
        self._file: Any = system.open(path, "wb")

    def write(self, data: memoryview) -> None:
        """Append `data`."""
        self._file.write(data)

    def finish(self) -> None:
        """Complete the upload."""
        self._file.close()

    def abandon(self) -> None:
        """Drop the upload where the library can; what remains has no manifest and is nothing.

        Nothing is deleted: an abandoned call that wakes up late must not remove what a later
        attempt has written and committed under the same name (CK-2).
        """
        with suppress(OSError, RuntimeError, AttributeError, NotImplementedError):
            self._file.discard()
        # Buffered files complete their upload when they are collected, unless they are closed.
        with suppress(AttributeError):
            self._file.closed = True


class ObjectInput:
    """An object, read by ranges."""

    def __init__(self, system: Any, path: str) -> None:
        self._system = system
        self._path = path

    def read_into(self, position: int, into: memoryview) -> int:
        """As `Input.read_into`."""
        if not len(into):
            return 0
        data = self._system.cat_file(self._path, start=position, end=position + len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Nothing is held."""


class FsspecStore:
    """Checkpoints below a prefix of an object store."""

    def __init__(
        self, url: str, *, retries: Retries | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """`options` go to the fsspec file system. Raises ConfigError."""
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                f"'{url}' needs fsspec: pip install 'trainmover[object-storage]'"
            ) from error
        try:
            self._system, root = fsspec.core.url_to_fs(url, **(options or {}))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"'{url}' can't be opened: {error}") from error
        self._url = url
        self._root = str(root).rstrip("/")
        self.retries = retries or Retries()
        protocol = self._system.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._is_flat = bool(protocols & FLAT)

    @property
    def location(self) -> str:
        """The URL."""
        return self._url

    def exists(self) -> bool:
        """Whether anything is below the prefix."""
        self._system.invalidate_cache()
        return bool(self._system.exists(self._root))

    def list_folders(self) -> list[str]:
        """As `Store.list_folders`."""
        found = self._listing("")
        return sorted(name for name, kind, _ in found if kind == "directory" and name.isprintable())

    def list_files(self, folder: str) -> dict[str, int]:
        """As `Store.list_files`."""
        return {name: size for name, kind, size in sorted(self._listing(folder)) if kind == "file"}

    def _listing(self, folder: str) -> list[tuple[str, str, int]]:
        path = self._path(folder) if folder else self._root
        self._system.invalidate_cache()

        def attempt() -> list[tuple[str, str, int]]:
            try:
                found = self._system.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return [
                (str(item["name"]).rstrip("/").rsplit("/", 1)[-1], item["type"], item["size"] or 0)
                for item in found
            ]

        return retrying(attempt, self.retries, doing="listing", path=self._shown(folder))

    def staging(self, name: str) -> str:
        """The final place: nothing can be renamed here."""
        return name

    def make_root(self) -> None:
        """As `Store.make_root`."""
        if self._is_flat:
            return
        retrying(
            lambda: self._system.makedirs(self._root, exist_ok=True),
            self.retries,
            doing="making",
            path=self._url,
        )

    def make_folder(self, folder: str) -> None:
        """Directories come with their first object, but where the library wants them made."""
        if self._is_flat:
            return
        path = self._path(folder)
        retrying(
            lambda: self._system.makedirs(path, exist_ok=True),
            self.retries,
            doing="making",
            path=self._shown(folder),
        )

    def create(self, path: str) -> ObjectOutput:
        """As `Store.create`."""
        return ObjectOutput(self._system, self._path(path))

    def put(self, path: str, data: bytes) -> None:
        """As `Store.put`, with retries."""
        full = self._path(path)
        retrying(
            lambda: self._system.pipe_file(full, data),
            self.retries,
            doing="writing",
            path=self._shown(path),
        )

    def open(self, path: str) -> ObjectInput:
        """As `Store.open`."""
        full = self._path(path)
        if not self._system.exists(full):
            raise named(FileNotFoundError(2, "no such object"), "opening", self._shown(path))
        return ObjectInput(self._system, full)

    def read(self, path: str) -> bytes:
        """As `Store.read`."""
        full = self._path(path)
        data = retrying(
            lambda: self._system.cat_file(full),
            self.retries,
            doing="reading",
            path=self._shown(path),
        )
        return bytes(data)

    def publish(self, folder: str, name: str) -> str:
        """Nothing to move: the manifest's put was the commit."""
        return folder if folder == name else name

    def retire(self, name: str) -> str:
        """Nothing can be renamed, and nothing that is empty is there."""
        return name

    def delete_file(self, path: str, *, is_durable: bool = False) -> None:
        """As `Store.delete_file`."""
        full = self._path(path)

        def attempt() -> None:
            with suppress(FileNotFoundError):
                self._system.rm_file(full)

        retrying(attempt, self.retries, doing="deleting", path=self._shown(path))

    def delete_folder(self, folder: str) -> bool:
        """As `Store.delete_folder`."""
        if self._listing(folder):
            return False
        with suppress(FileNotFoundError, OSError, NotImplementedError):
            self._system.rmdir(self._path(folder))
        return True

    def free(self) -> None:
        """Object stores don't say."""
        return

    def _path(self, relative: str) -> str:
        return f"{self._root}/{names.check_relative(relative)}"

    def _shown(self, relative: str) -> str:
        return f"{self._url.rstrip('/')}/{relative}" if relative else self._url
