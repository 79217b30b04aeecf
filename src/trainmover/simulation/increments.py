"""A simulated backup of every step: gradients of each update, held by the nearest backup.

Does with integers what increments, increment_side and playing of the worker do with tensors; which
updates are held is decided by the worker's own lines. A joiner reads a snapshot from an agent's
memory, asks the holder for the updates since, and makes them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmover.errors import StateMismatch
from trainmover.protocol.messages import Edge, Plan, Source, Version
from trainmover.simulation import fetching, numbers
from trainmover.simulation.channels import Ask, CutOverWork, Part
from trainmover.topology.membership import backups_of, wards_of
from trainmover.worker import events as worker_events
from trainmover.worker.increment_lines import Lines

if TYPE_CHECKING:
    from trainmover.simulation.process import Process


@dataclass(frozen=True, slots=True)
class Update:
    """All ranks' gradients of one step: what the owner's optimizer is given."""

    owner_rank: int
    base: Version
    version: Version
    gradients: tuple[int, ...]


class Held:
    """Updates that one process holds, and who holds its own."""

    def __init__(self, kept: int) -> None:
        self.lines: Lines[Update] = Lines(kept, lambda _: None)
        self.holder = ""


def recorded(process: Process, version: Version, gradients: tuple[int, ...]) -> tuple[Update, ...]:
    """At the gate: the update that leads to `version`, for the frame to the holder."""
    if not process.world.scenario.increments_kept:
        return ()
    update = Update(process.life.rank, process.life.applied, version, gradients)
    process.increments.lines.add(update)
    return (update,)


def for_backup(process: Process, backup: int, updates: tuple[Update, ...]) -> tuple[Update, ...]:
    """Only the nearest backup is sent updates."""
    membership = process.life.membership
    is_holder = membership is not None and backups_of(process.life.rank, membership)[0] == backup
    return updates if is_holder else ()


def renewed(process: Process, plan: Plan, rank: int, backup: int) -> tuple[Update, ...]:
    """Finding 7: what a backup of the plan's generation does not hold yet."""
    if plan.kind == "planned" or backups_of(rank, plan.membership)[0] != backup:
        return ()
    name = plan.membership.members[backup].incarnation
    source = next((s for s in plan.sources if s.rank == rank), None)
    if name == process.increments.holder or (source is not None and source.bulk_from == name):
        return ()
    line = process.increments.lines.line(rank)
    return tuple(update for update in line if update.version.step <= plan.target.step)


def committed(process: Process, plan: Plan) -> None:
    """Run in another generation."""
    rank = plan.membership.rank_of(process.name)
    if rank is None:
        return
    holder = next(iter(backups_of(rank, plan.membership)), None)
    held = process.increments
    held.holder = "" if holder is None else plan.membership.members[holder].incarnation
    held.lines.drop_above(plan.target.step)
    held.lines.keep_only({rank, *wards_of(rank, plan.membership)})


# --------------------------------------------------------------------------- a joiner


def begin(process: Process, work: CutOverWork, source: Source) -> None:
    """Read the snapshot that the plan names; the updates are asked for behind it."""
    process.later(process.world.scenario.move_s, lambda: _read_base(process, work, source))


def _read_base(process: Process, work: CutOverWork, source: Source) -> None:
    if process.cut_over is not work:
        return
    world, plan = process.world, work.plan
    memory = world.machines[source.machine].memory
    is_there = memory is not None and memory.is_alive()
    assert source.base is not None
    copy = memory.read(source.rank, source.base) if memory is not None and is_there else None
    if fetching.is_dark(process, source.machine):
        return  # the cut-over is stuck on it
    if copy is None:
        edge = Edge(peer=source.machine, reason="the snapshot could not be fetched")
        process.feed(worker_events.CutOverBroke(number=plan.number, edge=edge))
        return
    work.base = copy.numbers
    channel = process.next_channels.get(source.bulk_from)
    if source.base == plan.target:
        work.parts["bulk"] = Part(plan.number, "bulk", plan.target, copy.numbers.bulk)
        work.proceed()
    elif channel is not None:
        channel.send(process, Ask(plan.number, "updates", source.rank, base=source.base))


def serve(process: Process, work: CutOverWork, ask: Ask) -> Part | None:
    """The updates a joiner asks for; None where they are not held."""
    assert ask.base is not None
    target = work.plan.target
    try:
        path = process.increments.lines.path(ask.rank, ask.base, target)
    except StateMismatch:
        return None
    return Part(ask.generation, "updates", target, 0, updates=path)


def play(process: Process, work: CutOverWork, part: Part) -> None:
    """The updates have arrived: make them again."""
    state = work.base
    assert state is not None
    for update in part.updates:
        skipped = any(numbers.is_non_finite(value) for value in update.gradients)
        bulk = numbers.apply(
            state, 0, update.gradients, is_skipped=skipped, changes_in_tail=False
        ).bulk
        state = numbers.Numbers(bulk, state.own, state.shared)
        process.increments.lines.add(update)
    work.parts["bulk"] = Part(part.generation, "bulk", part.version, state.bulk)
