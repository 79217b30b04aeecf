"""What a process has forgotten goes back to the system."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from trainmover.edges import heap

MIB = 1 << 20


def resident_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_free_pages_between_used_ones_go_back() -> None:
    if not heap.give_back():
        pytest.skip("this C library has no malloc_trim")
    # Below the size from which the C library maps memory of its own for each.
    held = [bytes(100_000) for _ in range(640)]
    kept = held[::64]
    full = resident_bytes()
    del held
    assert heap.give_back()
    assert full - resident_bytes() > 32 * MIB
    assert all(len(each) == 100_000 for each in kept)


def test_upkeep_goes_on_until_it_is_cancelled() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(heap.keep_small(), 0.0))
