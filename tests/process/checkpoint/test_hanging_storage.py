"""A storage that gives no answer: bounded, and what wakes up late publishes nothing (B10)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.process.checkpoint.stage import save_and_prune
from tests.unit.checkpoint.sample import QUICK, local, make
from tests.waiting import eventually

from trainmover.checkpoint import bounded
from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.local_store import LocalInput, LocalOutput, LocalStore
from trainmover.checkpoint.reader import load, open_checkpoint
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import pick
from trainmover.checkpoint.writer import WriteOptions, write_rank
from trainmover.errors import (
    StorageHung,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with step 10 committed."""
    save_and_prune(tmp_path / "root", 10)
    return tmp_path / "root"


def committed(path: Path) -> list[int]:
    """Steps committed, each of them complete."""
    found = survey(local(path)).committed
    for item in found:
        assert not open_checkpoint(local(path), item.name).verify()
    return [item.manifest.step for item in found]


class Clock:
    """In the place of `time`: goes on only where a storage takes its time. Where this process is
    made to wait by others nothing is late."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_hanging = False
        """Whether each look at it finds it further on."""

    def monotonic(self) -> float:
        self.now_s += 0.3 if self.is_hanging else 0.0
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of all that is bounded."""
    found = Clock()
    monkeypatch.setattr(bounded, "time", found)
    return found


class FifoOutput(LocalOutput):
    """A file whose writes block in the kernel until somebody reads a FIFO."""

    clock: Clock

    def write(self, data: memoryview) -> None:
        self.clock.is_hanging = True
        with open(self._path.parent.parent / "fifo", "wb") as fifo:  # blocks without a reader
            fifo.write(b"x")
        super().write(data)


class HangingStore(LocalStore):
    """A storage that gives no answer: a dead network file system, played by a FIFO."""

    def create(self, path: str) -> LocalOutput:
        if not path.endswith(".safetensors"):
            return super().create(path)
        return FifoOutput(self._path(path), self.retries)


def test_a_hanging_storage(root: Path, clock: Clock) -> None:
    """Bounded; the caller goes on; the thread that wakes up late publishes nothing."""
    FifoOutput.clock = clock
    os.mkfifo(root / "fifo")
    state, image = make(0, 1, 20)
    watch = Watch()
    options = WriteOptions(limits=Limits(stall_s=0.5, total_s=20), watch=watch)
    with pytest.raises(StorageHung, match="no progress at .*rank-00000.safetensors"):
        write_rank(HangingStore(root, retries=QUICK), state, image, options=options)
    assert not watch.has_ended, "the thread still holds the image"
    assert committed(root) == [10]
    assert save_and_prune(root, 30) == [], "the next save is not in its way"
    reader = os.open(root / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        eventually(lambda: watch.has_ended, "the abandoned thread to end")
    finally:
        os.close(reader)
    assert committed(root) == [30]
    assert not list(root.glob("writing-*/*.safetensors"))


def test_loading_is_bounded(root: Path) -> None:
    """The load limit: a storage that hangs while it is read ends by name, too."""
    os.mkfifo(root / "fifo")

    class DeadStore(LocalStore):
        def open(self, path: str) -> LocalInput:
            if path.endswith(".safetensors"):
                with open(self.root / "fifo", "rb") as fifo:  # blocks without a writer
                    fifo.read(1)
            return super().open(path)

    store = DeadStore(root, retries=QUICK)
    with pytest.raises(StorageHung, match="loading step 10"):
        load(
            lambda watch: pick({"durable": store}, watch=watch),
            what="step 10",
            limits=Limits(stall_s=0.5, total_s=10),
        )
    writer = os.open(root / "fifo", os.O_RDWR)
    os.write(writer, b"x")
    os.close(writer)
    assert pick({"durable": local(root)}) is not None


def test_a_slow_storage_is_not_a_hung_one(root: Path, clock: Clock) -> None:
    """Longer in all than a stall may last, but getting further: saved."""

    class SlowStore(LocalStore):
        def put(self, path: str, data: bytes) -> None:
            clock.now_s += 0.02
            super().put(path, data)

        def create(self, path: str) -> LocalOutput:
            clock.now_s += 0.05
            return super().create(path)

    state, image = make(0, 1, 20)
    options = WriteOptions(split_bytes=8, chunk_bytes=8, limits=Limits(stall_s=0.6, total_s=60))
    record = write_rank(SlowStore(root, retries=QUICK), state, image, options=options)
    assert clock.now_s > options.limits.stall_s
    assert len(record.files) > 20
