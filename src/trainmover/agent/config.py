"""Time-outs of the agent."""

from __future__ import annotations

from dataclasses import dataclass

from trainmover.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What the agent waits for and how often it speaks."""

    heartbeat_interval_s: float = 1.0
    """Between two heartbeats; shorter finds stopped workers sooner and costs messages."""
    controller_timeout_s: float = 300.0
    """Without any controller for so long the agent ends its workers and itself."""
    leave_timeout_s: float = 120.0
    """How long an agent that was asked to stop waits for its ranks to be moved elsewhere."""
    kill_grace_s: float = 2.0
    """From a kill to a second one when the exit of the worker is not seen."""
    grace_s: float = 0.0
    """From a notice (SIGTERM, SIGUSR1, `notice_file`) to the end of the machine, as its owner has
    said; 0: not known. What does not fit into it is left out. `--grace` sets it."""
    notice_file: str = ""
    """File whose appearance says that this machine is about to be taken away; a number in it is the
    seconds that are left. `{machine}` stands for the machine's name. Empty: nobody writes one."""
    outbox_limit: int = 10_000
    """Messages kept for the controller while the link is down; the oldest are dropped beyond."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name != "grace_s" and not isinstance(value, str) and value <= 0:
                raise ConfigError(f"agent.{name} must be above 0, got {value}")
        if self.grace_s < 0:
            raise ConfigError(f"agent.grace_s must be at least 0, got {self.grace_s}")
        if 3 * self.heartbeat_interval_s >= self.controller_timeout_s:
            text = (
                f"agent.controller_timeout_s ({self.controller_timeout_s}) must be above three "
                f"times agent.heartbeat_interval_s ({self.heartbeat_interval_s})"
            )
            raise ConfigError(text)
