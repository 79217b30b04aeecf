"""The controller's hands for a look into storage: choose, on a thread, and say what came of it.

Decides which exit code a choice that can't be made has. What is chosen is the checkpoint room's
answer to what the job's command says (`resume`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from trainmover import controller
from trainmover.daemons.resume import Places, choose_again, choose_start
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol import exits
from trainmover.topology.keeping import Keeping

log = logging.getLogger(__name__)


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
                found, notes = choose_again(self.run_id, self.keeping, places, order.left)
        except TrainMoverError as error:
            log.warning("look %d: %s", order.number, error)
            code = exits.BAD_USAGE if isinstance(error, ConfigError) else exits.START_FAILED
            return controller.StorageSeen(number=order.number, code=code, reason=str(error)), []
        return controller.StorageSeen(number=order.number, found=found), notes
