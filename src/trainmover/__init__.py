"""trainmover: interruption-resilient distributed PyTorch training.

The public names are loaded when they are first used, so that a controller or an agent host, which
needs no torch, starts in well under a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmover.errors import TrainMoverError
    from trainmover.state.value import Value
    from trainmover.worker.entry import current_job, run
    from trainmover.worker.job import Job
    from trainmover.worker.step import Step
    from trainmover.worker.unwinding import Left

__version__ = "0.1.0.dev0"

_HOMES = {
    "Job": "trainmover.worker.job",
    "Left": "trainmover.worker.unwinding",
    "Step": "trainmover.worker.step",
    "TrainMoverError": "trainmover.errors",
    "Value": "trainmover.state.value",
    "current_job": "trainmover.worker.entry",
    "run": "trainmover.worker.entry",
}

__all__ = ["Job", "Left", "Step", "TrainMoverError", "Value", "current_job", "run"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'trainmover' has no attribute {name!r}")
    return getattr(import_module(home), name)
