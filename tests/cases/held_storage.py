"""An object storage that gives no answer as long as somebody wants it to: an fsspec plug-in.

Installed into a job's processes as any third party's is: a module and an entry point on the path.
What is written waits in the kernel, in the opening of a FIFO that nobody writes to.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trainmover.drills.request import JobRequest

MODULE = """
import os

from fsspec.implementations.local import LocalFileSystem

FOLDER = os.environ["HELD_STORAGE"]


class HeldFileSystem(LocalFileSystem):
    protocol = "held"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("held://"))

    def _open(self, path, mode="rb", **options):
        if "w" in mode and os.path.exists(f"{FOLDER}/hold"):
            open(f"{FOLDER}/fifo", "rb").close()
        return super()._open(path, mode, **options)
"""
ENTRY_POINT = "[fsspec.specs]\nheld = held_file_system:HeldFileSystem\n"
METADATA = "Metadata-Version: 2.1\nName: held-file-system\nVersion: 1\n"


class HeldStorage:
    """One of them, with its switch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "held"
        described = self._folder / "held_file_system-1.dist-info"
        described.mkdir(parents=True)
        (self._folder / "held_file_system.py").write_text(MODULE)
        (described / "entry_points.txt").write_text(ENTRY_POINT)
        (described / "METADATA").write_text(METADATA)
        os.mkfifo(self._folder / "fifo")

    def under(self, wanted: JobRequest, place: Path) -> JobRequest:
        """The job with this storage where it would have used the directory `place`."""
        flags = [f"held://{place}" if flag == str(place) else flag for flag in wanted.flags]
        known = os.environ.get("PYTHONPATH", "")
        environment = (
            *wanted.environment,
            ("HELD_STORAGE", str(self._folder)),
            ("PYTHONPATH", os.pathsep.join(filter(None, (str(self._folder), known)))),
        )
        return replace(wanted, flags=tuple(flags), environment=environment)

    def hang(self) -> None:
        """From now on nothing that is written gets an answer."""
        (self._folder / "hold").touch()

    def let_go(self) -> None:
        """It is well again; whoever waits goes on."""
        (self._folder / "hold").unlink(missing_ok=True)
        # Opening both ends wakes every reader; the FIFO stays empty.
        os.close(os.open(self._folder / "fifo", os.O_RDWR | os.O_NONBLOCK))
