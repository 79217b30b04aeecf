"""The numbered invariants of the protocol, as functions of a journal and of observations.

Decides whether what happened may happen. Does not decide what should happen next, and knows
neither where observations come from: simulation and drills feed the same checker.
"""

from trainmover.checks.checker import Checker
from trainmover.checks.observations import (
    Applied,
    AttemptBegan,
    Ended,
    GateEntered,
    GatePassed,
    JoinerLoaded,
    Observation,
    PreparedAt,
    Reported,
    RunsIn,
    SnapshotLoaded,
    StepReached,
    Violation,
)

__all__ = [
    "Applied",
    "AttemptBegan",
    "Checker",
    "Ended",
    "GateEntered",
    "GatePassed",
    "JoinerLoaded",
    "Observation",
    "PreparedAt",
    "Reported",
    "RunsIn",
    "SnapshotLoaded",
    "StepReached",
    "Violation",
]
