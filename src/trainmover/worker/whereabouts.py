"""What this worker tells peers that wait for it: where its main thread is, and whom it awaits.

Decides nothing: the lifecycle's state in the communicator's words. A rank that is outside a step
may keep the others waiting (it saves, it evaluates), one inside may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.communicator.settings import Place
from trainmover.protocol.messages import Version
from trainmover.topology.membership import wards_of
from trainmover.worker.lifecycle_state import (
    Building,
    HeldInGate,
    InGate,
    NotEntered,
    Ready,
    Rehearsing,
    Running,
    WorkerState,
)

if TYPE_CHECKING:
    from trainmover.worker.runtime import Runtime


def show_whereabouts(runtime: Runtime) -> None:
    """From now on peers that ask are told."""
    runtime.communicator.show_place(
        lambda: place_of(runtime.state), lambda: awaited_wards(runtime.state)
    )


def place_of(state: WorkerState) -> Place:
    """Where the main thread is."""
    match state.main:
        case NotEntered() | Building() | Rehearsing():
            return Place.BUILDING
        case Running() if state.step_time_ns:
            return Place.INSIDE
        case Ready() | InGate() | HeldInGate():
            return Place.AT_GATE
        case _:  # also this process's first step: it may compile while the others have
            return Place.OUTSIDE


def awaited_wards(state: WorkerState) -> tuple[int, ...]:
    """Ranks without whose personal state this rank may not contribute to its gate (W3)."""
    if not isinstance(state.main, Ready) or state.membership is None:
        return ()
    version = Version(step=state.main.step + 1, lineage=state.generation)
    held = {item.owner_rank for item in state.personal if item.version == version}
    wards = wards_of(state.rank, state.membership)
    return tuple(ward for ward in wards if ward not in held)
