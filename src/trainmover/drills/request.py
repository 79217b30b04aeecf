"""How a job of a drill is started, and what it leaves when it has ended: plain values.

Decides what belongs to "the same job" (see `undisturbed`): everything here but faults, disturbance,
standbys and flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.daemons.run_directory import OutcomeFile
from trainmover.protocol.journal import IncidentReport

FOLDER_WORD: Final = "{folder}"
"""Stands for the run's own folder in a script's arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """How a job is started."""

    script: Path
    arguments: tuple[str, ...] = ()
    machines: int = 4
    standbys: int = 1
    workers_per_machine: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    """As for ``--set``."""
    environment: tuple[tuple[str, str], ...] = ()
    disturbance: tuple[tuple[str, str], ...] = ()
    """More environment, for scripts that can hurt themselves; the undisturbed run lacks it."""
    flags: tuple[str, ...] = ()
    """More flags of ``trainmover run``."""
    faults: str = ""
    """Rules of `trainmover.edges.faults`."""
    limit_s: float = 300.0
    """The whole run; then everything is killed and the drill has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """What is left of a job that has ended by itself."""

    code: int
    output: str
    losses: dict[int, dict[str, str]]
    """Step -> name -> hex float."""
    repeated: tuple[int, ...]
    """Steps that were recorded more than once under one lineage."""
    final: dict[str, Any] | None
    """What the script wrote to ``{folder}/final.json``."""
    incidents: tuple[IncidentReport, ...]
    outcome: OutcomeFile | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberView:
    """Who plays one rank."""

    rank: int
    machine: str
    incarnation: str
