"""The controller's hands for a look into storage: choose, on a thread, and say what came of it.

Decides which exit code a choice that can't be made has. What is chosen is the checkpoint room's
answer to what the job's command says (`resume`).

Storage may give no answer for minutes. The job's end does not wait for that: nobody joins the
thread of a look, as asyncio would join those of its own pool.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trainmover import controller
from trainmover.daemons.resume import Places, choose_again, choose_start
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol import exits
from trainmover.topology.keeping import Keeping

log = logging.getLogger(__name__)

T = TypeVar("T")


async def beside(work: Callable[..., T], *arguments: object) -> T:
    """The result of `work`, run on a thread that the end of this process does not wait for."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(put: Callable[[Any], None], value: object) -> None:
        if not result.done():  # whoever waited may have been cancelled
            put(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], object]
        try:
            outcome = (result.set_result, work(*arguments))
        except Exception as error:  # handed to whoever waits, whatever it is
            outcome = (result.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            return  # the loop is closed: the process ends

    threading.Thread(target=run, name="storage", daemon=True).start()
    return await result


@dataclass(frozen=True, kw_only=True)
class Looker:
    """Carries out `LookIntoStorage`."""

    resume: str
    run_id: str
    keeping: Keeping
    secret: bytes
    """With which agents let one read their disks."""

    def look(self, order: controller.LookIntoStorage) -> tuple[controller.StorageSeen, list[str]]:
        """What is there, and lines for people. Blocks: until `checkpoint.load_timeout_s`."""
        places = Places(disks=order.disks, secret=self.secret)
        try:
            if order.is_start:
                found, notes = choose_start(self.resume, self.keeping, places)
            else:
                found, notes = choose_again(self.run_id, self.keeping, places, order)
        except TrainMoverError as error:
            log.warning("look %d: %s", order.number, error)
            code = exits.BAD_USAGE if isinstance(error, ConfigError) else exits.START_FAILED
            return controller.StorageSeen(number=order.number, code=code, reason=str(error)), []
        return controller.StorageSeen(number=order.number, found=found), notes
