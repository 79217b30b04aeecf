"""Exit codes of a job, one per reason; documented in docs/operations.md."""

from __future__ import annotations

from typing import Final

COMPLETED: Final = 0
SCRIPT_FAILED: Final = 1
"""The user's script raised; its traceback is the last thing printed."""
BAD_USAGE: Final = 2
CANNOT_RESTORE: Final = 3
"""A lost rank's state exists nowhere any more; the message names the ranks."""
CONTROLLER_LOST: Final = 4
TOO_MANY_INCIDENTS: Final = 5
NO_MACHINE: Final = 6
"""A rank was lost and no machine can take it."""
INCOMPATIBLE: Final = 7
PROTOCOL_FAILED: Final = 8
"""A message contradicts the protocol: stopped rather than guessed."""
STOPPED_BY_OPERATOR: Final = 9
START_FAILED: Final = 10
"""Workers did not come up or did not form the first generation in time."""
SUSPENDED: Final = 11
"""Stopped on request with its last state in a checkpoint: started again, it goes on from there."""
NOT_SAVED: Final = 12
"""All steps are done, and the state behind the last one is not in the storage: in no checkpoint, or
on machines' own disks only."""
INTERRUPTED: Final = 130

REASONS: Final[dict[int, str]] = {
    COMPLETED: "completed",
    SCRIPT_FAILED: "the script raised an exception",
    BAD_USAGE: "bad usage or configuration",
    CANNOT_RESTORE: "a lost rank's state can't be restored",
    CONTROLLER_LOST: "the controller was lost for too long",
    TOO_MANY_INCIDENTS: "too many incidents",
    NO_MACHINE: "no machine can take a lost rank",
    INCOMPATIBLE: "a machine differs from the job's",
    PROTOCOL_FAILED: "the protocol was violated",
    STOPPED_BY_OPERATOR: "stopped by the operator",
    START_FAILED: "the job did not start",
    SUSPENDED: "suspended: its last state is in a checkpoint",
    NOT_SAVED: "completed, but its last state is not in the storage",
    INTERRUPTED: "interrupted",
}
