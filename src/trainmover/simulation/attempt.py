"""A simulated attempt of a step: collectives, gate, apply, undo, run-out.

Does what worker/runtime.py and the user's script do together, with integers for tensors. Every
rank's gradient reaches every other rank over the channels, so that a step needs all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmover.checks import observations as seen
from trainmover.protocol import flags
from trainmover.protocol.messages import Edge, Held, Version
from trainmover.simulation import increments, memory, numbers, tails
from trainmover.simulation.channels import Data, GateFrame, Personal, Poison
from trainmover.topology.membership import backups_of, gate_peers
from trainmover.worker import events as worker_events

if TYPE_CHECKING:
    from trainmover.simulation.process import Process

UNDO_S = 0.002
LAID_OUT = 2
"""Iterations after which a model's bucket layout changes no more."""


@dataclass
class Attempt:
    """One attempt of `step`."""

    step: int
    generation: int
    main_life: int
    is_computed: bool = False
    is_complete: bool = False
    is_tainted: bool = False
    gradients: tuple[int, ...] = ()


@dataclass
class Gate:
    """This rank's side of one gate."""

    generation: int
    step: int
    kind: int
    vector: tuple[int, ...]
    round: int = 0
    is_over: bool = False


def start(process: Process, step: int) -> None:
    """PROCEED: run `step`, or the finish gate behind the last one."""
    process.attempt_count += 1
    process.world.training_began()
    process.world.moment("boundary")
    mine = Attempt(step, process.generation, process.main_life)
    process.attempt = mine
    scenario = process.world.scenario
    if step >= scenario.steps:
        mine.is_complete = True
        memory.take_last(process, process.life.applied)
        process.later(0.001, lambda: _ask_gate(process, mine, flags.FINISH))
        return
    layout = min(process.iterations, LAID_OUT)
    began = seen.AttemptBegan(
        incarnation=process.name, generation=process.generation, step=step, layout=layout
    )
    process.world.observe(began)
    process.later(scenario.step_s, lambda: _computed(process, mine))


def _is_current(process: Process, mine: Attempt) -> bool:
    return process.attempt is mine and mine.main_life == process.main_life


def _computed(process: Process, mine: Attempt) -> None:
    """Forward and backward are over; the gradient goes to everybody."""
    if not _is_current(process, mine) or mine.is_tainted:
        return
    scenario = process.world.scenario
    rank = process.life.rank
    if scenario.script_fails_at == mine.step and rank == 0:
        event = worker_events.MainFailed(
            rank=rank,
            step=mine.step,
            text="Traceback",
            error="ValueError: as the scenario says",
            was_running_out=False,
            is_machine_caused=False,
        )
        process.world.has_script_failed = True
        process.feed(event)
        return
    mine.is_computed = True
    value = numbers.gradient(rank, process.numbers)
    process.data[mine.step, rank] = value
    frame = Data(mine.generation, mine.step, rank, value)
    for _, channel in sorted(process.channels.items()):
        channel.send(process, frame)
    check_complete(process)


def check_complete(process: Process) -> None:
    """READY: all collectives of the step are through, none of them invented (W2)."""
    mine = process.attempt
    if mine is None or not mine.is_computed or mine.is_complete or mine.is_tainted:
        return
    world_size = process.world.scenario.world_size
    found = [process.data.get((mine.step, rank)) for rank in range(world_size)]
    gradients = tuple(value for value in found if value is not None)
    if len(gradients) < world_size:
        return
    process.world.moment("ready")
    mine.is_complete = True
    process.iterations += 1
    mine.gradients = gradients
    at_gate = numbers.own_at_gate(process.numbers, mine.step)
    version = Version(step=mine.step + 1, lineage=mine.generation)
    changes = process.world.scenario.changes_in_tail
    updates = increments.recorded(process, version, gradients)
    send_personal(process, version, at_gate, is_final=not changes, updates=updates)
    process.later(0.0005, lambda: _ask_gate(process, mine, flags.STEP))


def _ask_gate(process: Process, mine: Attempt, kind: int) -> None:
    if not _is_current(process, mine):
        return
    vector = [0] * flags.FIXED_SLOTS
    vector[flags.HAS_UPDATE] = 1
    if kind == flags.STEP:
        own = mine.gradients[process.life.rank]
        vector[flags.NON_FINITE] = int(numbers.is_non_finite(own))
        if process.life.rank == 0:
            vector[flags.SNAPSHOT] = process.world.scenario.level_after(mine.step)
    event = worker_events.GateRequested(step=mine.step, kind=kind, flags=tuple(vector))
    process.feed(event)


# ------------------------------------------------------------------ personal state


def send_personal(
    process: Process,
    version: Version,
    value: int,
    *,
    is_final: bool,
    updates: tuple[increments.Update, ...] = (),
) -> None:
    """To both backups of the current generation, unless it is poisoned."""
    membership = process.life.membership
    if membership is None or process.is_broken:
        return
    for backup in backups_of(process.life.rank, membership):
        channel = process.channels.get(membership.members[backup].incarnation)
        if channel is None:
            continue
        given = increments.for_backup(process, backup, updates)
        rank = process.life.rank
        channel.send(process, Personal(process.generation, rank, version, value, is_final, given))


def store_personal(process: Process, frame: Personal) -> None:
    """Keep a ward's personal state; a final copy is never replaced by a gate copy."""
    lines = process.increments.lines
    for update in frame.updates:
        lines.add(update)
    key = (frame.owner, frame.version)
    known = process.personal.get(key)
    if known is None or not known[1] or frame.is_final:
        process.personal[key] = (frame.value, frame.is_final)
    held = Held(
        owner_rank=frame.owner,
        version=frame.version,
        is_final=process.personal[key][1],
        replay_from=lines.begin_of(frame.owner, frame.version),
    )
    process.feed(worker_events.PersonalReceived(held=held))


# ------------------------------------------------------------------ the gate


def contribute(process: Process, command: worker_events.ContributeGate) -> None:
    """Enter the gate with this rank's flags."""
    process.world.moment("gate")
    mine = process.attempt
    held = tuple(
        (owner, version.step)
        for owner, version in sorted(process.personal)
        if version.lineage == process.generation
    )
    event = seen.GateEntered(
        incarnation=process.name,
        generation=process.generation,
        step=command.step,
        rank=process.life.rank,
        is_tainted=mine is None or mine.is_tainted or not mine.is_complete,
        held=held,
        is_finish=command.kind == flags.FINISH,
    )
    process.world.observe(event)
    process.gate = Gate(process.generation, command.step, command.kind, command.flags)
    _send_round(process, process.gate)
    advance_gate(process)


def _send_round(process: Process, gate: Gate) -> None:
    membership = process.life.membership
    if membership is None or process.is_broken:
        return
    rounds = gate_peers(process.life.rank, membership.world_size)
    if gate.round >= len(rounds):
        return
    to = membership.members[rounds[gate.round][0]].incarnation
    channel = process.channels.get(to)
    if channel is not None:
        frame = GateFrame(gate.generation, gate.step, gate.round, gate.kind, gate.vector)
        channel.send(process, frame)


def advance_gate(process: Process, *, is_receiving: bool = False) -> None:
    """Take the rounds that are in; deliver the result unless the gate is closed.

    The frame that completes a gate delivers it before anything behind it on the channel is read.
    """
    gate = process.gate
    membership = process.life.membership
    if gate is None or gate.is_over or membership is None:
        return
    if gate.generation != process.generation:
        return
    is_closed = gate.generation < process.closed_below
    if is_closed and process.life.follows("freeze_closes_gates"):
        return
    rounds = gate_peers(process.life.rank, membership.world_size)
    while gate.round < len(rounds):
        frame = process.gate_frames.get((gate.step, gate.round))
        if frame is None:
            return
        merged = zip(gate.vector, frame.vector, strict=True)
        gate.vector = tuple(max(pair) for pair in merged)
        gate.round += 1
        _send_round(process, gate)
    gate.is_over = True
    done = worker_events.GateCompleted(
        generation=gate.generation, step=gate.step, kind=gate.kind, vector=gate.vector
    )
    if is_receiving:
        _deliver(process, done)
    else:
        process.later(0.0002, lambda: _deliver(process, done))


def _deliver(process: Process, done: worker_events.GateCompleted) -> None:
    is_closed = done.generation < process.closed_below
    if is_closed and process.life.follows("freeze_closes_gates"):
        return
    process.feed(done)


# ------------------------------------------------------------------ what follows the gate


def apply_gate(process: Process, step: int, vector: tuple[int, ...]) -> None:
    """Optimizer and tail; then the next boundary."""
    mine = process.attempt
    if mine is None or mine.step != step or not mine.is_complete:
        process.world.fail("W13", f"{process.name} is told to apply {step} without gradients")
        return
    process.last_gate = step
    process.world.moment("tail")
    tails.begin(process, step, lambda called: _tail_over(process, mine, vector, called))


def _tail_over(
    process: Process, mine: Attempt, vector: tuple[int, ...], called: tuple[int, ...]
) -> None:
    if not _is_current(process, mine):
        return
    scenario = process.world.scenario
    process.iterations += scenario.closure_calls - 1
    tails.keep(process)
    process.numbers = numbers.apply(
        process.numbers,
        mine.step,
        mine.gradients,
        is_skipped=bool(vector[flags.NON_FINITE]),
        changes_in_tail=scenario.changes_in_tail,
        tails=called,
    )
    process.observe_step()
    process.attempt = None
    _forget_older(process, mine.step)
    version = Version(step=mine.step + 1, lineage=process.generation)
    if scenario.changes_in_tail:
        send_personal(process, version, process.numbers.own, is_final=True)
    level = vector[flags.SNAPSHOT]
    if level and scenario.snapshot_every:
        memory.take(process, version, level, is_suspect=bool(vector[flags.NON_FINITE]))
    process.at_boundary(mine.step + 1)


def _forget_older(process: Process, step: int) -> None:
    for key in [key for key in process.data if key[0] <= step]:
        del process.data[key]
    for round_key in [key for key in process.gate_frames if key[0] <= step]:
        del process.gate_frames[round_key]
    for tail_key in [key for key in process.tail_data if key[0] <= step]:
        del process.tail_data[tail_key]
    needed = step if process.kept is not None else step + 1
    for held in [key for key in process.personal if key[1].step < needed]:
        del process.personal[held]


def undo(process: Process, step: int) -> None:
    """Put everything back; then the same boundary again."""
    life = process.main_life
    process.attempt = None
    process.gate = None

    def undone() -> None:
        if life == process.main_life:
            process.at_boundary(step)

    process.later(UNDO_S, undone)


def break_generation(process: Process, edges: tuple[Edge, ...]) -> None:
    """Poison to all peers; collectives that wait end with invented values: the attempt is void."""
    frame = Poison(process.generation, edges)
    for _, channel in sorted(process.channels.items()):
        channel.send(process, frame)
    process.is_broken = True
    tails.strike(process)
    mine = process.attempt
    if mine is None or mine.is_complete:
        return
    mine.is_tainted = True
    world = process.world
    if world.random.random() < world.scenario.run_out_fails:
        reason = "exception half-way through backward"
        process.later(UNDO_S, lambda: process.feed(worker_events.RunOutFailed(reason=reason)))
        return
    process.later(world.scenario.step_s / 2, lambda: _run_out(process, mine))


def _run_out(process: Process, mine: Attempt) -> None:
    if _is_current(process, mine):
        process.iterations += 1
        process.attempt = None
        process.at_boundary(mine.step)
