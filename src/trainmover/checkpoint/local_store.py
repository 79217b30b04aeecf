"""A store in a directory of a file system, local or shared.

Decides how bytes become durable: temporary name, write, fsync, rename, fsync of the directory.
Modes follow the umask, as a plain `open` would give them (C38). Symbolic links below the root are
not followed, so that an alias is never taken for a checkpoint of its own and no link leads outside
the root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmover.checkpoint import names
from trainmover.checkpoint.failures import Retries, named, retrying
from trainmover.errors import StorageFailed, StorageVanished

FLUSH_BYTES: Final = 256 << 20
"""Dirty bytes of one file before they are flushed: bounds the page cache, and shows progress."""
_OPEN_FOR_WRITING: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
)
# Without O_NONBLOCK, opening a FIFO that has a checkpoint's name would wait for ever (X1.8).
_OPEN_FOR_READING: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class LocalSpace:
    """Free space and free inodes, as far as an ordinary user may use them."""

    byte_count: int
    file_count: int | None


class LocalOutput:
    """A file under a temporary name beside its final one."""

    def __init__(self, path: Path, retries: Retries) -> None:
        self._path = path
        self._retries = retries
        self._partial = path.with_name(names.partial_name(path.name))
        self._unflushed = 0
        with naming("creating", self._partial):
            self._file = os.open(self._partial, _OPEN_FOR_WRITING, 0o666)

    def write(self, data: memoryview) -> None:
        """Append `data`, flushing every FLUSH_BYTES."""
        left = data
        while left:
            count = os.write(self._file, left)
            self._unflushed += count
            left = left[count:]
        if self._unflushed >= FLUSH_BYTES:
            os.fdatasync(self._file)
            self._unflushed = 0

    def finish(self) -> None:
        """fsync, rename, fsync of the directory."""
        os.fsync(self._file)
        self._close()
        rename(self._partial, self._path, self._retries)
        sync_folder(self._path.parent)

    def abandon(self) -> None:
        """Close and unlink; what can't be unlinked is a leftover for `cleaning`."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._partial.unlink()

    def _close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


class LocalInput:
    """A regular file opened for reading."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with naming("opening", path):
            self._file = os.open(path, _OPEN_FOR_READING)
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise StorageFailed(f"opening {path}: not a regular file")

    def read_into(self, position: int, into: memoryview) -> int:
        """As `Input.read_into`."""
        done = 0
        with naming("reading", self._path):
            while done < len(into):
                count = os.preadv(self._file, [into[done:]], position + done)
                if count == 0:
                    break
                done += count
        return done

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)


class LocalStore:
    """Checkpoints below a directory."""

    def __init__(self, root: Path, *, retries: Retries | None = None) -> None:
        """`root` need not exist before the first save."""
        self.root = root
        self.retries = retries or Retries()

    @property
    def location(self) -> str:
        """The directory."""
        return str(self.root)

    def exists(self) -> bool:
        """Whether the root is a directory."""
        return self.root.is_dir()

    def list_folders(self) -> list[str]:
        """As `Store.list_folders`; sorted, because listings differ between machines (C52)."""
        try:
            with os.scandir(self.root) as found:
                return sorted(e.name for e in found if _is_folder(e))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise named(error, "listing", str(self.root)) from error

    def list_files(self, folder: str) -> dict[str, int]:
        """As `Store.list_files`."""
        path = self._path(folder)
        try:
            with os.scandir(path) as found:
                return dict(sorted(_sizes(found)))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise named(error, "listing", str(path)) from error

    def staging(self, name: str) -> str:
        """A directory of another name: `publish` renames it."""
        return names.staging_name(name)

    def make_root(self) -> None:
        """As `Store.make_root`."""

        def make() -> None:
            self.root.mkdir(parents=True, exist_ok=True)

        retrying(make, self.retries, doing="making", path=str(self.root))

    def make_folder(self, folder: str) -> None:
        """As `Store.make_folder`."""
        path = self._path(folder)

        def make() -> None:
            self.root.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir()
                sync_folder(path.parent)

        retrying(make, self.retries, doing="making", path=str(path))

    def create(self, path: str) -> LocalOutput:
        """As `Store.create`."""
        return LocalOutput(self._path(path), self.retries)

    def put(self, path: str, data: bytes) -> None:
        """As `Store.put`, with retries."""
        target = self._path(path)

        def attempt() -> None:
            output = LocalOutput(target, self.retries)
            try:
                output.write(memoryview(data))
                output.finish()
            except BaseException:
                output.abandon()
                raise

        retrying(attempt, self.retries, doing="writing", path=str(target))

    def open(self, path: str) -> LocalInput:
        """As `Store.open`."""
        return LocalInput(self._path(path))

    def read(self, path: str) -> bytes:
        """As `Store.read`."""
        file = self.open(path)
        try:
            with naming("reading", self._path(path)):
                data = bytearray(os.fstat(file._file).st_size)
            count = file.read_into(0, memoryview(data))
            return bytes(data[:count])
        finally:
            file.close()

    def publish(self, folder: str, name: str) -> str:
        """Rename the directory; under an alternative name where somebody else's is in the way."""
        source = self._path(folder)
        for candidate in names.alternatives(name):
            target = self._path(candidate)
            if not _is_occupied(target):
                rename(source, target, self.retries)
                sync_folder(self.root)
                return candidate
        raise StorageFailed(
            f"publishing {source}: {name} and every alternative are occupied; move them away"
        )

    def retire(self, name: str) -> str:
        """Rename to the staging name: there even an empty directory is known to be a leftover.

        Not where somebody else's files would be moved with it.
        """
        source, folder = self._path(name), names.staging_name(name)
        with naming("listing", source):
            is_ours = all(names.is_own_file(file) for file in os.listdir(source))
        if not is_ours or _is_occupied(self._path(folder)):
            return name
        rename(source, self._path(folder), self.retries)
        sync_folder(self.root)
        return folder

    def delete_file(self, path: str, *, is_durable: bool = False) -> None:
        """As `Store.delete_file`."""
        target = self._path(path)

        def attempt() -> None:
            target.unlink(missing_ok=True)
            if is_durable:
                sync_folder(target.parent)

        retrying(attempt, self.retries, doing="deleting", path=str(target))

    def delete_folder(self, folder: str) -> bool:
        """As `Store.delete_folder`."""
        path = self._path(folder)
        try:
            path.rmdir()
            sync_folder(self.root)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise named(error, "deleting", str(path)) from error
        return True

    def free(self) -> LocalSpace | None:
        """Of the file system that the root is on, or will be on."""
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        with naming("asking for the free space of", place):
            found = os.statvfs(place)
        files = found.f_favail if found.f_files else None
        return LocalSpace(byte_count=found.f_bavail * found.f_frsize, file_count=files)

    def _path(self, relative: str) -> Path:
        return self.root / names.check_relative(relative)


@contextmanager
def naming(doing: str, path: Path) -> Iterator[None]:
    """Errors that can't pass get a name here; the others are left to whoever repeats the file."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise named(error, doing, str(path)) from error


def rename(source: Path, target: Path, retries: Retries) -> None:
    """Rename, repeated a few times; never by copying (C34)."""

    def attempt() -> None:
        os.rename(source, target)

    retrying(attempt, retries, doing=f"renaming {source} to", path=str(target), is_rename=True)


def sync_folder(path: Path) -> None:
    """Make names in a directory durable; some file systems can't and need not."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise StorageVanished(
            f"flushing {path}: the directory has gone: mount or make it again"
        ) from error
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(file)


def _is_occupied(path: Path) -> bool:
    """True unless a directory can be renamed to `path`: nothing there, or an empty directory."""
    try:
        mode = path.lstat().st_mode
        return not stat.S_ISDIR(mode) or bool(os.listdir(path))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # unreadable: not ours to replace


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.name.isprintable()
    except OSError:
        return False  # vanished while we looked, or unreadable: not a checkpoint to rely on


def _sizes(found: Iterator[os.DirEntry[str]]) -> Iterator[tuple[str, int]]:
    for entry in found:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # vanished while we looked
        if stat.S_ISREG(status.st_mode):
            yield entry.name, status.st_size
