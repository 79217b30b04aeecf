"""A file tree over the real one: what a rehearsing script writes lies in a scratch directory.

Decides which path a file operation really gets. Reads see what the script has written, then what
is really there; what it has removed is only hidden. Nothing outside the scratch directory changes.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

COPIED_BYTES = 64 << 20
"""Larger files are not copied when they are opened for appending: a hole of their size stands in.
"""


class Overlay:
    """Paths as the script names them, and where they lie."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = str(scratch)
        self._gone: set[str] = set()
        self.is_used = False
        """Whether anything has been written or hidden; else every read sees the real tree."""
        self.made: list[str] = []
        """Directories the script has made, in order."""

    def over(self, path: str) -> str:
        """Where a path's stand-in lies, whether or not there is one."""
        return self.scratch + "/files" + os.path.abspath(path)

    def seen(self, path: str) -> str:
        """The path that a read of `path` gets; a missing one where the script removed it."""
        if not self.is_used:
            return path
        over = self.over(path)
        if os.path.lexists(over):
            return over
        return over if self._is_gone(path) else path

    def exists(self, path: str) -> bool:
        """Whether the script believes that `path` is there."""
        return os.path.lexists(self.seen(path))

    def _is_gone(self, path: str) -> bool:
        if not self._gone:
            return False
        path = os.path.abspath(path)
        while path not in self._gone:
            parent = os.path.dirname(path)
            if parent == path:
                return False
            path = parent
        return True

    # ------------------------------------------------------------------ changes

    def for_writing(self, path: str, *, keeps_content: bool, is_new: bool) -> str:
        """The stand-in that a write to `path` gets.

        Raises FileNotFoundError, FileExistsError, IsADirectoryError as the real tree would.
        """
        if is_new and self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if os.path.isdir(self.seen(path)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        over = self._under_parent(path)
        if keeps_content and not os.path.lexists(over) and self.exists(path):
            _copy(self.seen(path), over)
        return over

    def _under_parent(self, path: str) -> str:
        parent = os.path.dirname(os.path.abspath(path))
        if not self.exists(parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        over = self.over(path)
        os.makedirs(os.path.dirname(over), exist_ok=True)
        self.is_used = True
        return over

    def make_directory(self, path: str) -> None:
        """`os.mkdir`."""
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.mkdir(self._under_parent(path))
        self.made.append(os.path.abspath(path))

    def remove(self, path: str) -> None:
        """`os.remove`, `os.rmdir`, `shutil.rmtree`: the path is hidden."""
        if not self.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        over = self.over(path)
        if os.path.isdir(over) and not os.path.islink(over):
            shutil.rmtree(over)
        elif os.path.lexists(over):
            os.unlink(over)
        self._gone.add(os.path.abspath(path))
        self.is_used = True

    def move(self, source: str, target: str) -> None:
        """`os.rename`, `os.replace`."""
        if not self.exists(source):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        over = self._under_parent(target)
        if not os.path.lexists(self.over(source)):
            _copy(self.seen(source), self._under_parent(source))
        os.replace(self.over(source), over)
        self._gone.add(os.path.abspath(source))

    def names(self, path: str) -> list[str]:
        """`os.listdir`."""
        over, found = self.over(path), set()
        if os.path.isdir(path) and not self._is_gone(path):
            found = {
                name for name in os.listdir(path) if not self._is_gone(os.path.join(path, name))
            }
        elif not os.path.isdir(over):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if os.path.isdir(over):
            found |= set(os.listdir(over))
        return sorted(found)

    # ------------------------------------------------------------------ the end

    def make_up(self) -> list[str]:
        """Make the script's directories for real: it counts on them once it has a rank.

        Returns what could not be made.
        """
        failed = []
        for path in self.made:
            if os.path.isdir(self.over(path)):
                try:
                    os.makedirs(path, exist_ok=True)
                except OSError as error:
                    failed.append(f"{path}: {error.strerror}")
        self.made = []
        return failed


def _copy(source: str, target: str) -> None:
    if os.path.isdir(source):
        shutil.copytree(source, target)
    elif os.path.getsize(source) > COPIED_BYTES:
        with open(target, "wb") as file:
            file.truncate(os.path.getsize(source))
    else:
        shutil.copyfile(source, target)
