"""What a new job starts from: the newest valid checkpoint, one by name, or its own beginning.

Decides how the command's words become a question; the answer is the checkpoint room's, one for all
ranks. Every byte of what is chosen is compared with its checksum before anybody loads it. A job
that starts from the newest checkpoint continues the run that made it; one that was told a name is a
run of its own, and whatever is there is left alone.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final

from trainmover import controller
from trainmover.checkpoint.bounded import Limits, Watch
from trainmover.checkpoint.choice import Asked, Choice, Passed
from trainmover.checkpoint.reader import load
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.tiers import DURABLE, EVERYTHING, open_tiers, pick
from trainmover.daemons.other_disks import OtherDisks
from trainmover.errors import ConfigError, NothingToRestore
from trainmover.protocol.messages import DiskPart, Version
from trainmover.topology.keeping import CheckpointConfig, Keeping

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Machines' disks that agents let others read, beside the storage of all."""

    disks: tuple[controller.Disk, ...] = ()
    secret: bytes = b""


def waits_for_agents(resume: str, keeping: Keeping) -> bool:
    """Whether what to start from is known only once agents say what machines' disks have."""
    return keeping.checkpoint.is_on and bool(keeping.checkpoint.local_directory) and resume != NEVER


def choose_start(
    resume: str, keeping: Keeping, places: Places | None = None
) -> tuple[controller.Restored | None, list[str]]:
    """What to start from, and lines for people about what could not be used.

    Blocks: until `checkpoint.load_timeout_s`.

    Args:
        resume: The command's word.
        keeping: Settings of the job.
        places: Machines' disks, through their agents; None: those that can be seen from here.
    Raises:
        NothingToRestore: Something was asked for, or something broken is there, and nothing valid.
        StorageFailed: No tier can be read.
    """
    config = keeping.checkpoint
    if not config.is_on or resume == NEVER:
        return None, []
    asked = Asked(name="" if resume in (AUTO, REQUIRED) else resume, is_required=resume != AUTO)
    try:
        found = _choose(config, asked, places)
    except NothingToRestore as error:
        raise NothingToRestore(f"{config.directory}: {error} (--resume never)") from error
    if found is None:
        return None, []
    chosen, parts = found
    notes = [_passed(one) for one in chosen.passed_over]
    if config.local_directory:
        notes.append(f"files of {chosen.name}: {_served(chosen)}")
    notes.append(f"starts from checkpoint {chosen.name}, at step {chosen.manifest.step}")
    for line in notes:
        log.info("%s", line)
    restored = _restored(chosen, parts)
    if resume not in (AUTO, REQUIRED):
        restored = replace(restored, history=())
    return restored, notes


def choose_again(
    run_id: str, keeping: Keeping, places: Places, order: controller.LookIntoStorage
) -> tuple[controller.Restored, list[str]]:
    """The newest checkpoint that a job that runs may go back to; lines for people.

    Its own ones come first, then those of the runs that it continues, up to where it began.

    Blocks: until `checkpoint.load_timeout_s`.

    Args:
        run_id: Of the job.
        keeping: Its settings.
        places: Disks of machines that can be heard.
        order: What was gone back from, and where the job began.
    Raises:
        NothingToRestore: There is none.
        StorageFailed: No tier can be read.
    """
    begun_at = order.begun_at
    asked = Asked(
        run_id=run_id,
        is_required=True,
        left=order.left,
        history=order.history,
        begun_at=(begun_at.step, begun_at.lineage),
    )
    found = _choose(keeping.checkpoint, asked, places)
    if found is None:
        raise NothingToRestore(f"{keeping.checkpoint.directory} has no checkpoint of this run")
    chosen, parts = found
    notes = [_passed(one) for one in chosen.passed_over]
    notes.append(f"checkpoint {chosen.name} was found at step {chosen.manifest.step}")
    return _restored(chosen, parts), notes


def _choose(
    config: CheckpointConfig, asked: Asked, places: Places | None
) -> tuple[Choice, tuple[DiskPart, ...]] | None:
    """The choice, every byte of it checked, and what of it lies on which machine's disk."""
    limits = Limits(stall_s=min(STALL_S, config.load_timeout_s), total_s=config.load_timeout_s)
    others = None if places is None else OtherDisks(places.disks, places.secret)

    def work(watch: Watch) -> Choice | None:
        tiers = open_tiers(config)
        if others is not None:
            tiers = {**others.open(), DURABLE: open_store(config.directory)}
        return pick(tiers, asked, watch=watch, limits=limits)

    try:
        chosen = load(work, what=f"choosing a checkpoint in {config.directory}", limits=limits)
        if chosen is None:
            return None
        return chosen, () if others is None else others.parts(chosen)
    finally:
        if others is not None:
            others.close()


def _restored(chosen: Choice, parts: tuple[DiskPart, ...]) -> controller.Restored:
    manifest = chosen.manifest
    return controller.Restored(
        name=chosen.name,
        version=Version(step=manifest.step, lineage=manifest.lineage),
        run_id=manifest.run_id,
        history=(manifest.run_id, *manifest.history)[:LONGEST_HISTORY],
        disks=parts,
    )


def _passed(one: Passed) -> str:
    if one.name == EVERYTHING:
        return f"{one.tier} is left out: {one.reason}"
    return f"checkpoint {one.name} can't be used: {one.reason}"


def _served(chosen: Choice) -> str:
    counts = Counter(tier for _, tier in chosen.sources)
    return ", ".join(f"{counts[tier]} from {tier}" for tier in chosen.tiers())
