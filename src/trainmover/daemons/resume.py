"""What a new job starts from: the newest valid checkpoint, one by name, or its own beginning.

Decides how the command's words become a question; the answer is the checkpoint room's, one for all
ranks. Every byte of what is chosen is compared with its checksum before anybody loads it. A job
that starts from the newest checkpoint continues the run that made it; one that was told a name is a
run of its own, and whatever is there is left alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from trainmover import controller
from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.choice import Asked, Choice
from trainmover.checkpoint.reader import load
from trainmover.checkpoint.tiers import open_tiers, pick
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
LONGEST_HISTORY: Final = 256
"""Runs before that have no checkpoint left, unless everything is kept."""


def check_resume(resume: str, keeping: Keeping) -> None:
    """Raises ConfigError where words and settings don't fit together."""
    if not keeping.checkpoint.is_on and resume not in (AUTO, NEVER):
        raise ConfigError(f"--resume {resume}: name the directory too, --checkpoints DIR")
    if keeping.checkpoint.is_on:
        open_tiers(keeping.checkpoint)


def choose_start(resume: str, keeping: Keeping) -> tuple[controller.Restored | None, list[str]]:
    """What to start from, and lines for people about what could not be used.

    Blocks: until `checkpoint.load_timeout_s`.

    Raises:
        NothingToRestore: Something was asked for, or something broken is there, and nothing valid.
        StorageFailed: No tier can be read.
    """
    config = keeping.checkpoint
    if not config.is_on or resume == NEVER:
        return None, []
    asked = Asked(name="" if resume in (AUTO, REQUIRED) else resume, is_required=resume != AUTO)
    limits = Limits(stall_s=min(STALL_S, config.load_timeout_s), total_s=config.load_timeout_s)

    def work(watch: Watch) -> Choice | None:
        return pick(open_tiers(config), asked, watch=watch, limits=limits)

    try:
        chosen = load(work, what=f"choosing a checkpoint in {config.directory}", limits=limits)
    except NothingToRestore as error:
        raise NothingToRestore(f"{config.directory}: {error} (--resume never)") from error
    if chosen is None:
        return None, []
    manifest = chosen.manifest
    notes = [f"checkpoint {one.name} can't be used: {one.reason}" for one in chosen.passed_over]
    if config.local_directory:
        notes.append(f"files of {chosen.name}: {_served(chosen)}")
    notes.append(f"starts from checkpoint {chosen.name}, at step {manifest.step}")
    for line in notes:
        log.info("%s", line)
    version = Version(step=manifest.step, lineage=manifest.lineage)
    is_own = resume in (AUTO, REQUIRED)
    restored = controller.Restored(
        name=chosen.name,
        version=version,
        run_id=manifest.run_id,
        history=(manifest.run_id, *manifest.history)[:LONGEST_HISTORY] if is_own else (),
    )
    return restored, notes


def _served(chosen: Choice) -> str:
    counts = Counter(tier for _, tier in chosen.sources)
    return ", ".join(f"{counts[tier]} from {tier}" for tier in chosen.tiers())
