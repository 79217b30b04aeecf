"""Looks into storage run beside the controller, and its end waits for none of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trainmover.daemons.looking import beside
from trainmover.errors import StorageFailed

pytestmark = pytest.mark.timeout(30)


def test_storage_that_gives_no_answer_does_not_keep_the_controller_from_its_end() -> None:
    has_begun, answer, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        has_begun.set()
        answer.wait()
        ended.set()

    async def job() -> int:
        looking = asyncio.create_task(beside(hang))
        assert await asyncio.to_thread(has_begun.wait, 10.0)
        assert not looking.done()
        return 0

    try:
        assert asyncio.run(job()) == 0
        assert not ended.is_set()
    finally:
        answer.set()
    assert ended.wait(10.0), "its late answer goes nowhere, and harms nobody"


def test_what_was_found_or_went_wrong_comes_back() -> None:
    def fail(text: str) -> None:
        raise StorageFailed(text)

    async def play() -> None:
        assert await beside(sorted, [2, 1]) == [1, 2]
        with pytest.raises(StorageFailed, match="gone"):
            await beside(fail, "gone")

    asyncio.run(play())
