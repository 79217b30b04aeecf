"""What an embedded job is made of, and where people see it: for supervisor and callers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Screen(Protocol):
    """Where people see the job."""

    def line(self, kind: str, text: str) -> None:
        """One line that stays."""

    def progress(self, status: dict[str, Any], last: dict[str, Any] | None) -> None:
        """The line that changes."""

    def close(self) -> None:
        """Nothing more comes."""


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """What to run and how; one value for the command line, drills and benchmarks."""

    script: str
    arguments: tuple[str, ...] = ()
    machines: int = 2
    standbys: int = 0
    workers_per_machine: int = 1
    job: str = ""
    run_directory: Path
    settings: tuple[tuple[str, str], ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    entry: str = ""
    is_cold: bool = False
    orphan_timeout_s: float = 60.0
    resume: str = "auto"
    """What the job starts from: see `daemons.resume`."""
    topology: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """Labels by machine, as a topology file has them."""
    ends_at_wall_s: float = 0.0
    """When the scheduler ends the allocation, Unix time; 0: not known."""
    environment: dict[str, str] = field(default_factory=dict)
    """Added to the environment of every process of the job (drills)."""

    @property
    def machine_names(self) -> tuple[str, ...]:
        """``m0`` and so on, standbys last."""
        return tuple(f"m{index}" for index in range(self.machines + self.standbys))
