"""The pure decider of a job: who plays which rank, when to switch, and how to recover."""

from trainmover.controller.config import Config, ForeignTimeouts, check_relations
from trainmover.controller.events import (
    AgentLinked,
    AgentUnlinked,
    Append,
    Command,
    Disk,
    EndJob,
    Event,
    FromAgent,
    FromOperator,
    LookIntoStorage,
    PhaseReached,
    StorageSeen,
    Tick,
    ToAgent,
    ToOperator,
)
from trainmover.controller.invariants import violations
from trainmover.controller.kept import Restored, Unchosen
from trainmover.controller.placing import placement_text
from trainmover.controller.restart import initial_state
from trainmover.controller.state import State, Transition
from trainmover.controller.status import StatusView, status
from trainmover.controller.timers import next_deadline
from trainmover.controller.transition import transition

__all__ = [
    "AgentLinked",
    "AgentUnlinked",
    "Append",
    "Command",
    "Config",
    "Disk",
    "EndJob",
    "Event",
    "ForeignTimeouts",
    "FromAgent",
    "FromOperator",
    "LookIntoStorage",
    "PhaseReached",
    "Restored",
    "State",
    "StatusView",
    "StorageSeen",
    "Tick",
    "ToAgent",
    "ToOperator",
    "Transition",
    "Unchosen",
    "check_relations",
    "initial_state",
    "next_deadline",
    "placement_text",
    "status",
    "transition",
    "violations",
]
