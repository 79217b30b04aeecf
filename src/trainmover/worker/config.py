"""Settings of a worker process, with their trade-offs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from trainmover.errors import ConfigError

C = TypeVar("C")
EXACT_TAIL = ("seen", "always", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Limits and habits of the training process. All times in seconds."""

    threads: int = 1
    """Intra-op threads of torch; equal on all machines, or sums are split differently."""
    transfer_timeout_s: float = 60.0
    """Longest silence of a peer while state moves; shorter finds a dead source sooner."""
    serve_wait_s: float = 60.0
    """Longest wait of a state source until it stands at the requested version."""
    settle_attempts_max: int = 6
    """Most loop-back iterations of a standby until its collective sequence repeats."""
    exact_tail: str = "seen"
    """When each rank keeps a copy of its state in front of the gate, so that a loss that strikes a
    collective behind `optimizer.step()` repeats the step: `seen` (in the first step, and once one
    was called there), `always` (in every step), `off` (the value is dropped). Costs the memory and
    the copy of parameters and optimizer state."""
    tail_copy_limit_mb: int = 8192
    """Largest such copy of a rank; above it no rank keeps one."""
    leave_grace_s: float = 5.0
    """Time a leaver's `main` has to unwind before the process ends anyway."""
    closing_grace_s: float = 1.0
    """Time for last messages to reach the agent before the process ends."""
    is_check: bool = False
    """Set by `trainmover check`: undo and repeat step 2, note writes of standbys, end early."""
    max_steps: int = 0
    """End the loop after this many steps whatever the script asks for; 0: as the script says."""
    does_trace: bool = False
    """Print each move of the worker's lifecycle to its log."""
    does_log_digests: bool = False
    """Tell a digest of all that rank 0 tracks with every step; costs one pass over it."""
    does_scan: bool = True
    """Look for live modules, optimizers, schedulers that are not tracked, once at step 0."""
    is_strict: bool = False
    """Whether a live object that is not tracked is an error rather than a finding; it would begin
    anew after a loss or a restart."""
    restore_mismatch: str = "warn"
    """What a restored state means that gives other numbers than it gave before: "warn" or "stop".
    Stopping loses time to a false alarm (changed arguments or data), going on may lose the run."""
    compared: str = "loss"
    """Parts of the names of logged values that a step done again has to log again bit for bit."""

    def __post_init__(self) -> None:
        if self.exact_tail not in EXACT_TAIL:
            raise ConfigError(
                f"worker.exact_tail: expected one of {', '.join(EXACT_TAIL)}, got "
                f"{self.exact_tail!r}"
            )
        if self.tail_copy_limit_mb < 0:
            raise ConfigError(
                f"worker.tail_copy_limit_mb: expected at least 0, got {self.tail_copy_limit_mb}"
            )
        if self.restore_mismatch not in ("warn", "stop"):
            raise ConfigError(
                f"worker.restore_mismatch: expected warn or stop, got {self.restore_mismatch!r}"
            )
        if self.threads < 1:
            raise ConfigError(f"worker.threads: expected at least 1, got {self.threads}")
        if self.settle_attempts_max < 3:
            raise ConfigError(
                "worker.settle_attempts_max: expected at least 3 (DDP rebuilds its buckets in "
                f"the second iteration), got {self.settle_attempts_max}"
            )

    @property
    def stops_on_mismatch(self) -> bool:
        """Whether a mismatch behind a restore ends the job."""
        return self.restore_mismatch == "stop"


def read_settings(owner: type[C], prefix: str, settings: Mapping[str, str]) -> C:
    """An owner's config from flattened settings (`worker.threads` -> "1").

    The command line has checked them; here only text becomes a value again.
    """
    values: dict[str, Any] = {}
    for field in fields(owner):  # type: ignore[arg-type]
        text = settings.get(f"{prefix}.{field.name}")
        if text is not None:
            values[field.name] = _value(text, field.default, f"{prefix}.{field.name}")
    return owner(**values)


def _value(text: str, default: Any, name: str) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(default, (int, float)):
            return type(default)(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{name}: expected {type(default).__name__}, got {text!r}") from error
    return text
