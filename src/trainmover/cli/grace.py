"""Where the command line learns how much time a notice leaves, and which machines share a fate.

Reads option, environment and the scheduler's variable; what follows is decided elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from trainmover.daemons.grace import parse_grace
from trainmover.errors import ConfigError
from trainmover.topology.domains import labels_by_machine, parse_topology

VARIABLE: Final = "TRAINMOVER_GRACE_S"
SLURM_END: Final = "SLURM_JOB_END_TIME"
"""Unix time at which Slurm ends the allocation."""

GraceOption = Annotated[
    str,
    typer.Option("--grace", help="seconds from SIGTERM, SIGUSR1 or a notice to the machine's end"),
]
TopologyOption = Annotated[
    Path | None,
    typer.Option("--topology", help="file: a machine per line, rack=NAME switch=NAME power=NAME"),
]


def grace_text(option: str) -> str:
    """Seconds that option or environment names, checked; empty: none does. Raises ConfigError."""
    if option:
        return str(parse_grace(option, "--grace"))
    told = os.environ.get(VARIABLE, "")
    return str(parse_grace(told, VARIABLE)) if told else ""


def end_of_allocation_s() -> float:
    """Unix time; 0 where no scheduler has said."""
    told = os.environ.get(SLURM_END, "")
    return float(told) if told.isdecimal() else 0.0


def read_labels(path: Path | None) -> tuple[tuple[str, tuple[tuple[str, str], ...]], ...]:
    """Labels by machine of a topology file; none without one. Raises ConfigError."""
    if path is None:
        return ()
    try:
        return labels_by_machine(parse_topology(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--topology: {path} can't be read: {error}") from error
