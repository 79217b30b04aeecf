"""Settings of recording and rehearsal, with their trade-offs."""

from __future__ import annotations

from dataclasses import dataclass

from trainmover.errors import ConfigError

ANSWERS = ("recorded", "loopback", "zeros")
WRITES = ("refuse", "allow")
NICE_MAX = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalConfig:
    """How standbys are warmed up."""

    answers: str = "recorded"
    """`recorded`: collectives that cross machines are answered with what a member got in the
    job's first iteration (loop-back where there is no recording); `loopback`: as if every peer had
    sent what the standby sent; `zeros`: only to show that zeros are not good enough."""
    store: str = ""
    """Directory for recordings; empty: in the run directory. A directory that outlives the job
    lets the next run of the same script, arguments and layout reuse them. `{machine}` in it stands
    for the machine's name; a standby that does not see a file asks for it."""
    recording_limit_mb: int = 4096
    """Most memory a rank spends on its recording; beyond it nothing is kept and standbys rehearse
    in loop-back."""
    writes: str = "refuse"
    """`refuse`: what a rehearsing standby's script writes goes to a scratch directory, and what
    can't be redirected is refused; `allow`: no guard, the script is trusted to ask
    `job.is_primary`."""
    nice: int = 10
    """Nice values (0-19) that a standby steps back by while it rehearses, where that can be taken
    back when it is adopted (else by the batch policy); 0: it does not step back."""
    neighbour_wait_s: float = 60.0
    """Several workers per machine: how long a rehearsing worker waits in a collective inside its
    machine for the machine's other workers, before the rest is answered in loop-back; 0: loop-back
    from the start."""
    coverage_steps: int = 100
    """Steps after an adoption in which the joiner notes what its rehearsal had not seen."""
    shares_compile_cache: bool = True
    """Hand compiled code of a member to joiners that have not rehearsed, through the store."""

    def __post_init__(self) -> None:
        if self.answers not in ANSWERS:
            raise ConfigError(
                f"rehearsal.answers: expected one of {', '.join(ANSWERS)}, got '{self.answers}'"
            )
        if self.writes not in WRITES:
            raise ConfigError(
                f"rehearsal.writes: expected one of {', '.join(WRITES)}, got '{self.writes}'"
            )
        if not 0 <= self.nice <= NICE_MAX:
            raise ConfigError(f"rehearsal.nice: expected 0 to {NICE_MAX}, got {self.nice}")
        if self.neighbour_wait_s < 0:
            raise ConfigError(
                f"rehearsal.neighbour_wait_s: expected at least 0, got {self.neighbour_wait_s:g}"
            )
        if self.recording_limit_mb < 0:
            raise ConfigError(
                f"rehearsal.recording_limit_mb: expected at least 0, got {self.recording_limit_mb}"
            )
        if self.coverage_steps < 0:
            raise ConfigError(
                f"rehearsal.coverage_steps: expected at least 0, got {self.coverage_steps}"
            )
