"""What a new job starts from: the newest valid checkpoint, one by name, or its own beginning.

Decides how the command's words become a question; the answer is the checkpoint room's, one for all
ranks. Every byte of what is chosen is compared with its checksum before anybody loads it.
"""

from __future__ import annotations

import logging
from typing import Final

from trainmover import controller
from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.choice import Asked, Choice
from trainmover.checkpoint.reader import load
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.tiers import pick
from trainmover.errors import ConfigError, NothingToRestore
from trainmover.protocol.messages import Version
from trainmover.topology.keeping import Keeping

log = logging.getLogger(__name__)

AUTO: Final = "auto"
"""The newest valid checkpoint; a fresh start where there is none at all."""
NEVER: Final = "never"
"""A fresh start, whatever is there."""
REQUIRED: Final = "required"
"""The newest valid checkpoint; an error where there is none."""

STALL_S: Final = 60.0


def check_resume(resume: str, keeping: Keeping) -> None:
    """Raises ConfigError where words and settings don't fit together."""
    if not keeping.checkpoint.is_on and resume not in (AUTO, NEVER):
        raise ConfigError(f"--resume {resume}: name the directory too, --checkpoints DIR")
    if keeping.checkpoint.is_on:
        open_store(keeping.checkpoint.directory)


def choose_start(resume: str, keeping: Keeping) -> tuple[controller.Restored | None, list[str]]:
    """What to start from, and lines for people about what could not be used.

    Blocks: until `checkpoint.load_timeout_s`.

    Raises:
        NothingToRestore: Something was asked for, or something broken is there, and nothing valid.
        StorageFailed: The directory can't be read.
    """
    config = keeping.checkpoint
    if not config.is_on or resume == NEVER:
        return None, []
    asked = Asked(name="" if resume in (AUTO, REQUIRED) else resume, is_required=resume != AUTO)
    limits = Limits(stall_s=min(STALL_S, config.load_timeout_s), total_s=config.load_timeout_s)

    def work(watch: Watch) -> Choice | None:
        return pick({config.directory: open_store(config.directory)}, asked, watch=watch)

    try:
        chosen = load(work, what=f"choosing a checkpoint in {config.directory}", limits=limits)
    except NothingToRestore as error:
        raise NothingToRestore(f"{config.directory}: {error} (--resume never)") from error
    if chosen is None:
        return None, []
    manifest = chosen.manifest
    notes = [f"checkpoint {one.name} can't be used: {one.reason}" for one in chosen.passed_over]
    notes.append(f"starts from checkpoint {chosen.name}, at step {manifest.step}")
    for line in notes:
        log.info("%s", line)
    version = Version(step=manifest.step, lineage=manifest.lineage)
    return controller.Restored(name=chosen.name, version=version), notes
