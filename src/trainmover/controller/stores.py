"""What agents say of the states they keep, also while the job is ending.

Decides who hears it. An ending job hears of kept states only while the last good version is made
durable, and tells agents that come back that it is over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from trainmover.controller import checkpoints, shelf
from trainmover.controller.move import Move
from trainmover.controller.state import Ending, Machine
from trainmover.protocol.messages import (
    AgentHello,
    CheckpointCommitted,
    CheckpointFailed,
    FromAgentMessage,
    ShardsWritten,
    SnapshotsHeld,
    StopAgent,
)

LAST_WORDS = (SnapshotsHeld, ShardsWritten, CheckpointFailed, CheckpointCommitted)


def on_kept(
    move: Move, body: SnapshotsHeld | ShardsWritten | CheckpointFailed | CheckpointCommitted
) -> None:
    """A message about snapshots or checkpoints."""
    match body:
        case SnapshotsHeld():
            shelf.on_held(move, body)
            if body.level >= shelf.EMERGENCY:
                checkpoints.advance(move)  # not at the next pulse: time is short
        case ShardsWritten():
            checkpoints.on_shards(move, body)
        case CheckpointFailed():
            checkpoints.on_failed(move, body)
        case CheckpointCommitted():
            checkpoints.on_committed(move, body)
        case _ as never:
            assert_never(never)


def on_agent_while_ending(move: Move, name: str, body: FromAgentMessage) -> None:
    """Any message of an agent, the job being over."""
    phase = move.state.phase
    assert isinstance(phase, Ending)
    if phase.saves_until is not None and isinstance(body, LAST_WORDS):
        on_kept(move, body)
    if isinstance(body, AgentHello):
        known = move.state.machines.get(name) or Machine(name=name, heard_at=move.now)
        move.keep_machine(replace(known, is_linked=True, heard_at=move.now))
        told = tuple(dict.fromkeys((*phase.told, name)))
        move.enter(replace(phase, told=told))
        if phase.saves_until is None:
            move.send(name, StopAgent(term=move.state.term, code=phase.code, reason=phase.reason))
