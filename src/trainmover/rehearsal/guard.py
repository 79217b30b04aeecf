"""No trace on the world: what a rehearsing standby's script may touch.

Decides, while a shadow runs, which file operations go to the scratch directory (those of Python's
own functions and `torch.save`), which stay allowed (devices, compile and byte-code caches,
temporary files of loaders) and which are refused because they can't be redirected (connections,
processes, functions bound before). Each place in the script is named once. When no shadow runs
every function is what it was.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainmover.errors import RehearsalRefused
from trainmover.rehearsal.overlay import Overlay

ALLOWED = ("/dev/", "/proc/", "/sys/")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
CACHE_FOLDERS = ("~/.triton", "~/.cache/torch", "~/.cache/torch_extensions")
TEMPORARY = ("pymp-", "tmp", "torchinductor_", "torch_", "torchelastic_")
"""Beginnings of names that tempfile, multiprocessing and torch give to files in the temporary
directory."""
COMPILERS = ("/torch/_inductor/", "/torch/_dynamo/", "/torch/utils/cpp_extension", "/triton/")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
THREADS = "trainmover"
REMEDY = "Put it under `if job.is_primary:`"


class Guard:
    """Of one process; active between `begin` and `end`."""

    def __init__(
        self,
        scratch: Path,
        allowed: tuple[Path, ...],
        place: Callable[[], str],
        tell: Callable[[str], None],
    ) -> None:
        """Nothing is guarded yet.

        Args:
            scratch: Where redirected files lie; made on first use, removed at the end.
            allowed: Directories that stay as they are.
            place: File and line of the script.
            tell: Takes one sentence per place.
        """
        self._scratch = scratch
        self._overlay = Overlay(scratch)
        self._place = place
        self._tell = tell
        self._told: set[str] = set()
        self._is_active = False
        self._is_hooked = False
        self._inside = threading.local()
        self._pid = os.getpid()
        self._temporary = os.path.abspath(tempfile.gettempdir())
        self._allowed = tuple(
            os.path.abspath(path) + "/"
            for path in (
                str(scratch),
                *map(str, allowed),
                *(os.path.expanduser(folder) for folder in CACHE_FOLDERS),
            )
        )
        self._originals: list[tuple[Any, str, Any]] = []

    @property
    def is_active(self) -> bool:
        """Whether the script is guarded at present."""
        return self._is_active

    def begin(self) -> None:
        """A shadow starts."""
        if self._is_active:
            return
        self._is_active = True
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._audit)
        self._patch()

    def end(self) -> None:
        """The shadow is over: every function is what it was."""
        if not self._is_active:
            return
        self._is_active = False
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals = []

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """What this thread does meanwhile is ours, not the script's."""
        was_ours = getattr(self._inside, "is_ours", False)
        self._inside.is_ours = True
        try:
            yield
        finally:
            self._inside.is_ours = was_ours

    def adopted(self) -> list[str]:
        """The process has a rank: make the script's directories; what could not be made."""
        failed = self._overlay.make_up()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return failed

    # ------------------------------------------------------------------ who is meant

    def _is_meant(self) -> bool:
        return (
            self._is_active
            and not getattr(self._inside, "is_ours", False)
            and os.getpid() == self._pid
            and not threading.current_thread().name.startswith(THREADS)
        )

    def _is_covered(self, path: Any) -> bool:
        """Whether a read of `path` may have to see something else than what is really there."""
        return self._overlay.is_used and self._is_meant() and self._is_outside(path)

    def _is_outside(self, path: Any) -> bool:
        """Whether a write to `path` would be a trace."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a descriptor: whoever opened it was asked
        text = os.path.abspath(os.fsdecode(path))
        allowed = (*ALLOWED, *self._allowed, *_named_caches())
        if (text + "/").startswith(allowed) or "__pycache__" in text:
            return False
        parent, _, name = text[len(self._temporary) + 1 :].partition("/")
        in_temporary = text.startswith(self._temporary + "/")
        return not (in_temporary and (parent or name).startswith(TEMPORARY))

    def _note(self, what: str, path: Any) -> None:
        place = self._place()
        if place in self._told or place == "unknown place":
            return
        self._told.add(place)
        shown = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else path
        self._tell(
            f"{place}: a standby writes to {shown!r} while it rehearses ({what}); it went to a "
            f"scratch directory, not to the live job's file. {REMEDY}"
        )

    def _refuse(self, what: str) -> None:
        place = self._place()
        text = (
            f"{place}: a standby {what} while it rehearses; the live job would notice. {REMEDY}, "
            "or run with --rehearsal-writes allow"
        )
        if place not in self._told:
            self._told.add(place)
            self._tell(text)
        raise RehearsalRefused(text)

    # ------------------------------------------------------------------ redirecting

    def _patch(self) -> None:
        for owner, name, wrap in (
            (builtins, "open", self._opener),
            (io, "open", self._opener),
            (os, "open", self._os_opener),
            (os, "mkdir", self._changing(self._overlay.make_directory)),
            (os, "remove", self._changing(self._overlay.remove)),
            (os, "unlink", self._changing(self._overlay.remove)),
            (os, "rmdir", self._changing(self._overlay.remove)),
            (shutil, "rmtree", self._removing_tree),
            (os, "rename", self._moving),
            (os, "replace", self._moving),
            (os, "truncate", self._truncating),
            (os, "stat", self._looking),
            (os, "lstat", self._looking),
            (os, "access", self._looking),
            (os, "scandir", self._looking),
            (os, "listdir", self._listing),
            (torch.serialization, "_open_zipfile_writer", self._torch_writer),
        ):
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            setattr(owner, name, wrap(name, original))

    def _ours(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        """Work on the scratch directory with the real functions."""
        with self.lifted():
            return fn(*arguments)

    def _target(self, path: Any, *, keeps_content: bool, is_new: bool = False) -> Any:
        return self._ours(
            lambda: self._overlay.for_writing(
                os.fsdecode(path), keeps_content=keeps_content, is_new=is_new
            )
        )

    def _seen(self, path: Any) -> Any:
        return self._ours(self._overlay.seen, os.fsdecode(path))

    def _opener(self, name: str, original: Any) -> Any:
        def guarded(file: Any, mode: Any = "r", *rest: Any, **options: Any) -> Any:
            if not set(str(mode)) & set("wax+"):
                if self._is_covered(file):
                    file = self._seen(file)
            elif self._is_meant() and self._is_outside(file):
                target = self._target(file, keeps_content="w" not in mode, is_new="x" in mode)
                self._note(f"open with mode {mode!r}", file)
                file = target
            return original(file, mode, *rest, **options)

        return guarded

    def _os_opener(self, name: str, original: Any) -> Any:
        def guarded(path: Any, flags: int, *rest: Any, **options: Any) -> Any:
            if options.get("dir_fd") is not None:
                return original(path, flags, *rest, **options)
            if not flags & WRITE_FLAGS:
                if self._is_covered(path):
                    path = self._seen(path)
            elif self._is_meant() and self._is_outside(path):
                keeps, is_new = not flags & os.O_TRUNC, bool(flags & os.O_EXCL)
                target = self._target(path, keeps_content=keeps, is_new=is_new)
                self._note("os.open", path)
                path = target
            return original(path, flags, *rest, **options)

        return guarded

    def _changing(self, change: Callable[[str], None]) -> Callable[[str, Any], Any]:
        def wrap(name: str, original: Any) -> Any:
            def guarded(path: Any, *rest: Any, **options: Any) -> Any:
                if self._is_meant() and self._is_outside(path) and options.get("dir_fd") is None:
                    self._ours(change, os.fsdecode(path))  # what can't be done is no write
                    self._note(f"os.{name}", path)
                    return None
                return original(path, *rest, **options)

            return guarded

        return wrap

    def _removing_tree(self, name: str, original: Any) -> Any:
        def guarded(path: Any, ignore_errors: bool = False, *rest: Any, **options: Any) -> Any:
            if not (self._is_meant() and self._is_outside(path)):
                return original(path, ignore_errors, *rest, **options)
            try:
                self._ours(self._overlay.remove, os.fsdecode(path))
            except FileNotFoundError:
                if not ignore_errors and not options:
                    raise
                return None
            self._note("shutil.rmtree", path)
            return None

        return guarded

    def _moving(self, name: str, original: Any) -> Any:
        def guarded(source: Any, target: Any, **options: Any) -> Any:
            is_outside = self._is_outside(source) or self._is_outside(target)
            if self._is_meant() and is_outside and not options:
                self._ours(self._overlay.move, os.fsdecode(source), os.fsdecode(target))
                self._note(f"os.{name}", target)
                return None
            return original(source, target, **options)

        return guarded

    def _truncating(self, name: str, original: Any) -> Any:
        def guarded(path: Any, length: int) -> Any:
            if self._is_meant() and self._is_outside(path):
                self._note("os.truncate", path)
                path = self._target(path, keeps_content=True)
            return original(path, length)

        return guarded

    def _looking(self, name: str, original: Any) -> Any:
        def guarded(path: Any = ".", *rest: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None and self._is_covered(path):
                path = self._seen(path)
            return original(path, *rest, **options)

        return guarded

    def _listing(self, name: str, original: Any) -> Any:
        def guarded(path: Any = ".") -> Any:
            if self._is_covered(path):
                return self._ours(self._overlay.names, os.fsdecode(path))
            return original(path)

        return guarded

    def _torch_writer(self, name: str, original: Any) -> Any:
        def guarded(target: Any) -> Any:
            is_path = isinstance(target, str | os.PathLike)
            if is_path and self._is_meant() and self._is_outside(target):
                self._note("torch.save", target)
                target = self._target(target, keeps_content=False)
            return original(target)

        return guarded

    # ------------------------------------------------------------------ refusing

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_active or event not in REFUSED or not self._is_meant():
            return
        if event == "open":
            path, mode, flags = arguments
            is_write = bool(set(mode) & set("wax+")) if isinstance(mode, str) else flags is not None
            is_write = is_write and (not isinstance(flags, int) or bool(flags & WRITE_FLAGS))
            if is_write and self._is_outside(path):
                self._refuse(f"opens {os.fsdecode(path)!r} for writing")
        elif event in CONNECTS:
            if arguments[0].family in (socket.AF_INET, socket.AF_INET6):
                self._refuse(f"connects to {arguments[1]}")
        elif event in STARTS:
            if not _is_compiling():
                self._refuse(f"starts a process ({_shown(arguments[0])})")
        elif self._is_outside(arguments[0]):
            self._refuse(f"changes {_shown(arguments[0])} ({event})")


CONNECTS = frozenset(("socket.connect", "socket.sendto"))
STARTS = frozenset(("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"))
CHANGES = frozenset(
    (
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.mkdir",
        "os.truncate",
        "os.link",
        "os.symlink",
        "os.chmod",
        "os.chown",
    )
)
REFUSED = CONNECTS | STARTS | CHANGES | {"open", "sqlite3.connect"}


def _shown(value: Any) -> str:
    return repr(os.fsdecode(value) if isinstance(value, bytes) else value)


def _is_compiling() -> bool:
    """Whether torch's compiler is up the stack: it starts compilers and its own workers."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in COMPILERS):
            return True
        frame = frame.f_back
    return False


def _named_caches() -> list[str]:
    """Asked anew each time: a script may choose its cache in `main`."""
    named = [os.environ.get(name) for name in CACHES]
    return [os.path.abspath(folder) + "/" for folder in named if folder]
