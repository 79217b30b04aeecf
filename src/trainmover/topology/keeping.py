"""Settings of snapshots and checkpoints: how often, how many copies, where, how long.

Everyone reads them from the job's flattened settings: controller, agents and workers have to agree.
Decides nothing: cadences are texts here, understood by the checkpoint room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from trainmover.errors import ConfigError

NEVER: Final = "never"
"""Cadence that means: not at all."""

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotConfig:
    """Copies of the state in agents' memory."""

    cadence: str = "every 50 steps"
    """When all ranks take a snapshot; more often loses fewer steps where no replica is left, and
    blocks the step more often. "never": none, also none after a recovery."""
    peers: int = 2
    """Copies on other machines; each costs the size of a machine's state there. At most as many as
    there are other machines; 0: a lost machine's state is lost."""

    def __post_init__(self) -> None:
        if self.peers < 0:
            raise ConfigError(f"snapshot.peers must be at least 0, got {self.peers}")
        if not self.cadence.strip():
            raise ConfigError("snapshot.cadence is empty; say 'never' to take no snapshots")

    @property
    def is_on(self) -> bool:
        """Whether snapshots are taken at all."""
        return self.cadence.strip().lower() != NEVER


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Durable copies of snapshots."""

    directory: str = ""
    """Directory or URL of the checkpoints, reachable from every machine; empty: none are made."""
    cadence: str = ""
    """When a snapshot is made durable as well; empty: by the size of the job."""
    keep_last: int = 3
    """Checkpoints kept; older ones go once a newer one is durable."""
    split_bytes: int = 5_000_000_000
    """Largest file; bigger shards are split."""
    parallel_machines_share: float = 0.25
    """Share of the machines that write at the same time; more load the storage in bursts."""
    write_timeout_s: float = 1800.0
    """Longest time for one machine's shards or the manifest; then the checkpoint has failed and
    training goes on without it."""
    load_timeout_s: float = 600.0
    """Longest loading of a checkpoint at a start; then the start has failed."""
    max_tries: int = 3
    """Tries of one checkpoint before it is given up until the next is due."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "split_bytes", "max_tries"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"checkpoint.{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("write_timeout_s", "load_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"checkpoint.{name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.parallel_machines_share <= 1:
            text = "checkpoint.parallel_machines_share must be above 0 and at most 1"
            raise ConfigError(f"{text}, got {self.parallel_machines_share}")

    @property
    def is_on(self) -> bool:
        """Whether there is a place for checkpoints."""
        return bool(self.directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeping:
    """Both, as one job has them."""

    snapshot: SnapshotConfig = SnapshotConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def read_keeping(settings: Sequence[tuple[str, str]]) -> Keeping:
    """From a job's flattened settings; what is not there has its default. Raises ConfigError."""
    return Keeping(
        snapshot=_read(SnapshotConfig, "snapshot", dict(settings)),
        checkpoint=_read(CheckpointConfig, "checkpoint", dict(settings)),
    )


def _read(kind: type[C], section: str, settings: dict[str, str]) -> C:
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        text = settings.get(f"{section}.{field.name}")
        default: Any = field.default
        expected = type(default)
        try:
            values[field.name] = default if text is None else expected(text)
        except ValueError as error:
            wanted = f"{section}.{field.name}: expected {expected.__name__}"
            raise ConfigError(f"{wanted}, got {text!r}") from error
    return kind(**values)
