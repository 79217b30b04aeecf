"""One process per test session that has imported torch, and forks what tests ask it for.

Decides what is imported there, and how its descendants are told from everybody else's. It is
Python's own fork server: one thread, a fork per process, nothing inherited but the imports and the
environment of its start. That environment carries a mark of its own, since what a process was
started with is all that can be read of a stranger's environment: whatever bears it when a test has
ended, but the fork server, is that test's leftover (`tests.conftest`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import uuid
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Final

from trainmover.worker.nursery import NEEDED_FIRST

VARIABLE: Final = "TRAINMOVER_TEST_MARK"
MARK: Final = f"warm-{uuid.uuid4().hex}"
"""In the environment of the fork server and of all its descendants."""


def context() -> ForkServerContext:
    """Starts processes as forks of the warm one, which is started first where there is none."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload([*NEEDED_FIRST, "trainmover.communicator"])
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = MARK
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before
    return found
