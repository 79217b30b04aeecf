"""Progress pages of one machine's workers: files in memory-backed storage, mapped here."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from trainmover.edges import probes
from trainmover.protocol.messages import WorkerStatus
from trainmover.protocol.progress_page import PAGE_BYTES, Progress, ProgressPage


class Pages:
    """One page per live worker, by incarnation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pages: dict[str, tuple[ProgressPage, mmap.mmap]] = {}

    def path_of(self, incarnation: str) -> Path:
        """File of a worker's page."""
        return self._folder / f"{incarnation}.page"

    def open(self, incarnation: str) -> Path:
        """Map the worker's page, made and initialised unless an earlier agent has done so."""
        path = self.path_of(incarnation)
        if incarnation in self._pages:
            return path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, PAGE_BYTES)
            mapping = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        page = ProgressPage(mapping)
        if not page.is_initialised:
            page.initialise()
        self._pages[incarnation] = (page, mapping)
        return path

    def read(self, incarnation: str) -> Progress:
        """What the worker has written; empty for one without a page."""
        found = self._pages.get(incarnation)
        return Progress() if found is None else found[0].read()

    def fence(self, incarnation: str, generation: int) -> None:
        """Let the worker pass gates of `generation` only."""
        found = self._pages.get(incarnation)
        if found is not None:
            found[0].set_fence(generation)

    def status(self, incarnation: str, local_rank: int, pid: int) -> WorkerStatus:
        """The worker as seen from outside, whether or not its interpreter runs."""
        progress = self.read(incarnation)
        return WorkerStatus(
            incarnation=incarnation,
            local_rank=local_rank,
            pid=pid,
            generation=progress.generation,
            step=progress.step,
            gate=progress.gate,
            phase=progress.phase,
            process_state=probes.process_state(pid),
            last_collective=progress.last_collective,
        )

    def close(self, incarnation: str) -> None:
        """Forget the page of a worker that has ended."""
        found = self._pages.pop(incarnation, None)
        if found is not None:
            found[0].release()
            found[1].close()
        self.path_of(incarnation).unlink(missing_ok=True)
