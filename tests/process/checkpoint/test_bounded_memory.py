"""A save holds no second copy of the image, and 200 saves hold no more than twenty (B2, C29)."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
from tests.process.checkpoint.staging import ROOT
from tests.unit.checkpoint.sample import RUN, local

from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.retention import KeepLast
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.writer import write_rank
from trainmover.protocol.snapshot_image import ImageEntry

MIB = 1 << 20
LARGE_MIB, SMALL_MIB, SAVES = 96, 2, 200


def state_of(size: int, step: int) -> RankState:
    entry = ImageEntry(
        name="t",
        kind="parameter",
        dtype="uint8",
        shape=(size // MIB, MIB),
        offset=0,
        size_bytes=size,
        global_shape=(size // MIB, MIB),
        global_offset=(0, 0),
    )
    return RankState(
        rank=0,
        world_size=1,
        step=step,
        lineage=1,
        generation=1,
        identity="",
        entries=(entry,),
        personal=b"",
        shared=b"",
        bulk_digest=step,
        run_id=RUN,
    )


def filled(size: int) -> memoryview:
    """Shared memory as the agent has it, every page touched."""
    image = memoryview(mmap.mmap(-1, size))
    for begin in range(0, size, MIB):
        image[begin : begin + MIB] = bytes([begin // MIB % 251]) * MIB
    return image


def measure(root: Path) -> None:
    """Prints how far the peak and the resident set rose, in MiB."""
    process = psutil.Process()
    store = local(root)
    image = filled(LARGE_MIB * MIB)
    before = process.memory_info().rss
    peak = before

    class Spy(type(store)):  # type: ignore[misc]
        def create(self, path: str) -> object:
            nonlocal peak
            output = super().create(path)
            write = output.write

            def spying(data: memoryview) -> None:
                nonlocal peak
                write(data)
                peak = max(peak, process.memory_info().rss)

            output.write = spying  # type: ignore[method-assign]
            return output

    write_rank(Spy(root), state_of(len(image), 1), image)
    print((peak - before) // MIB)
    small = image[: SMALL_MIB * MIB]
    settled = 0
    for step in range(2, SAVES + 2):
        record = write_rank(store, state_of(len(small), step), small)
        commit(store, [record], Authority(term=1, generation=1))
        prune(store, KeepLast(1), run_id=RUN)
        if step == 20:
            settled = process.memory_info().rss
    print((process.memory_info().rss - settled) // MIB)


def test_memory(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.process.checkpoint.test_bounded_memory", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    extra, growth = map(int, result.stdout.split())
    assert extra < LARGE_MIB // 4, f"a save of {LARGE_MIB} MiB needed {extra} MiB more"
    assert growth <= 4, f"180 saves added {growth} MiB"
    assert len(os.listdir(tmp_path)) == 1


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
