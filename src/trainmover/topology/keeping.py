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

OFF: Final = "off"
AUTO: Final = "auto"
ALWAYS: Final = "always"
_INCREMENTS: Final = {
    "off": OFF,
    "false": OFF,
    "no": OFF,
    "auto": AUTO,
    "true": AUTO,
    "yes": AUTO,
    "always": ALWAYS,
}
LEAST_INCREMENTS: Final = 4

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
    stuck_loss_steps: int = 100
    """Logged losses in a row that are exactly the same, after which the loss counts as stuck: the
    last good checkpoint is kept aside, later ones are suspect. 0: it never does."""
    reserve_bytes: int = 268_435_456
    """Memory of a machine, or of its container, that snapshots leave alone. Where less is left a
    snapshot goes to the machine's disk, and the step waits for it."""
    disk_directory: str = ""
    """Where it goes then; empty: beside the job's logs. A directory in memory helps nobody."""
    disk_timeout_s: float = 60.0
    """Longest wait of a step for that; then it goes on without a snapshot."""
    increments: str = "off"
    """Back up every step: in front of each gate a rank sends the gradients that its optimizer is
    about to apply to another machine, and a loss without a live replica costs no step. "auto":
    ranks that have no replica on another machine; "always": all; "off". Costs one copy of the
    gradients per step, in memory and on the network."""
    increments_kept: int = 16
    """Steps of gradients kept of each rank, by itself and by one other; a snapshot is taken
    each time that half of them is used. Steps that take less time than a snapshot needs to reach
    its peers need more of them."""

    def __post_init__(self) -> None:
        if self.peers < 0:
            raise ConfigError(f"snapshot.peers must be at least 0, got {self.peers}")
        if self.reserve_bytes < 0:
            text = f"snapshot.reserve_bytes must be at least 0, got {self.reserve_bytes}"
            raise ConfigError(text)
        if self.disk_timeout_s <= 0:
            text = f"snapshot.disk_timeout_s must be above 0, got {self.disk_timeout_s}"
            raise ConfigError(text)
        if self.stuck_loss_steps < 0:
            text = f"snapshot.stuck_loss_steps must be at least 0, got {self.stuck_loss_steps}"
            raise ConfigError(text)
        if not self.cadence.strip():
            raise ConfigError("snapshot.cadence is empty; say 'never' to take no snapshots")
        if self.increments.strip().lower() not in _INCREMENTS:
            raise ConfigError(
                f"snapshot.increments: expected off, auto or always, got {self.increments!r}"
            )
        if self.increments_kept < LEAST_INCREMENTS:
            text = f"snapshot.increments_kept must be at least {LEAST_INCREMENTS}"
            raise ConfigError(f"{text}, got {self.increments_kept}")
        if self.ships_increments and not self.is_on:
            raise ConfigError(
                "snapshot.increments are played on top of a snapshot, and snapshot.cadence is "
                "'never'; give a cadence, or switch increments off"
            )

    @property
    def is_on(self) -> bool:
        """Whether snapshots are taken at all."""
        return self.cadence.strip().lower() != NEVER

    @property
    def ships_increments(self) -> bool:
        """Whether ranks back up every step."""
        return _INCREMENTS[self.increments.strip().lower()] != OFF

    @property
    def always_ships(self) -> bool:
        """Whether ranks with a live replica do, too."""
        return _INCREMENTS[self.increments.strip().lower()] == ALWAYS


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Durable copies of snapshots."""

    directory: str = ""
    """Directory or URL of the checkpoints, reachable from every machine; empty: none are made."""
    local_directory: str = ""
    """Directory on each machine's own disk, where its part of a checkpoint is written first and
    copied to `directory` from in the background: the state is let go of sooner, at the price of
    that space on each machine. Empty: written to `directory` at once."""
    cadence: str = ""
    """When a snapshot is made durable as well; empty: by the size of the job."""
    keep_last: int = 3
    """Checkpoints of this job kept on each tier, those of the runs that it continues included;
    older ones go once a newer one is durable."""
    split_bytes: int = 5_000_000_000
    """Largest file; bigger shards are split."""
    parallel_machines_share: float = 0.25
    """Share of the machines that write to `directory` at the same time; more load the storage in
    bursts."""
    write_timeout_s: float = 1800.0
    """Longest time for one machine's shards or the manifest; then the checkpoint has failed and
    training goes on without it."""
    load_timeout_s: float = 600.0
    """Longest loading of a checkpoint at a start; then the start has failed."""
    max_tries: int = 3
    """Tries of one checkpoint before it is given up until the next is due."""
    allows_cast: bool = False
    """Whether a checkpoint saved in other dtypes than the script's is cast on loading; what was
    cast is told, and the run is no longer exact. Else it is refused by name."""

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
        self._check_local()

    def _check_local(self) -> None:
        name, place = "checkpoint.local_directory", self.local_directory
        if place and not self.directory:
            text = f"{name} ({place}) is the first tier of two: set checkpoint.directory too"
            raise ConfigError(text)
        if "://" in place:
            raise ConfigError(f"{name}: expected a directory of each machine, got '{place}'")
        if place and place == self.directory:
            raise ConfigError(f"{name} and checkpoint.directory are both '{place}'; choose two")

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
            values[field.name] = default if text is None else _value(expected, text)
        except (KeyError, ValueError) as error:
            wanted = f"{section}.{field.name}: expected {expected.__name__}"
            raise ConfigError(f"{wanted}, got {text!r}") from error
    return kind(**values)


def _value(kind: type[Any], text: str) -> Any:
    return {"true": True, "false": False}[text.strip().lower()] if kind is bool else kind(text)
