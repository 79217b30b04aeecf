"""Going back over a gate: a collective behind it was cut short, so every rank repeats its step.

Decides what of a worker's state the repeated gate makes void. When that happens is decided by who
was cut short (`lifecycle_step`) and by the plan (`lifecycle_switch`).
"""

from __future__ import annotations

from msgspec.structs import replace

from trainmover.protocol import flags
from trainmover.worker.lifecycle_state import Bound, WorkerState


def repeating(state: WorkerState) -> WorkerState:
    """What the gate passed last has decided counts no more: it will be passed again."""
    result = flags.GateResult(vector=state.last_result) if state.last_result else None
    level = max(state.snapshot_wanted, result.snapshot if result is not None else 0)
    return replace(state, last_result=(), snapshot_wanted=level, previous=None)


def gone_back(state: WorkerState) -> WorkerState:
    """By a plan: over the gate passed last, together with a rank whose tail was cut short."""
    assert state.previous is not None
    back = state.previous
    return replace(repeating(state), applied=back, main=Bound(back.step))
