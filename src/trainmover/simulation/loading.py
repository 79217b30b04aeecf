"""A simulated load of kept state: a snapshot in a roll-back, a checkpoint in a start.

Does with three integers what worker/restoring.py does with tensors. What was loaded is shown to the
checker with the version that the bytes had, not with the one that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.checks import observations as seen
from trainmover.protocol.messages import Edge, Plan, Source
from trainmover.simulation.channels import CutOverWork
from trainmover.worker import events as worker_events

if TYPE_CHECKING:
    from trainmover.simulation.process import Process


def ask(process: Process, work: CutOverWork) -> None:
    """Fetch this rank's snapshot from the agent that the plan names."""
    if work.asked:
        return
    work.asked = True
    rank = work.plan.membership.rank_of(process.name)
    mine = [source for source in work.plan.sources if source.rank == rank]
    if not mine:
        process.world.fail("I9", f"plan {work.plan.number} has no source for rank {rank}")
        return
    process.later(process.world.scenario.move_s, lambda: _arrive(process, work, mine[0]))


def _arrive(process: Process, work: CutOverWork, source: Source) -> None:
    if process.cut_over is not work:
        return
    world, plan = process.world, work.plan
    memory = world.machines[source.machine].memory
    is_there = memory is not None and memory.is_alive()
    copy = memory.read(source.rank, plan.target) if memory is not None and is_there else None
    if copy is None or world.is_cut(process.machine, source.machine):
        edge = Edge(peer=source.machine, reason="the snapshot could not be fetched")
        process.feed(worker_events.CutOverBroke(number=plan.number, edge=edge))
        return
    process.numbers = copy.numbers
    work.is_loaded = True
    loaded = seen.SnapshotLoaded(incarnation=process.name, number=plan.number, version=copy.version)
    world.observe(loaded)
    work.proceed()


def restore(process: Process, plan: Plan) -> None:
    """A fresh start from a checkpoint: this rank's state at the plan's target."""
    world = process.world
    rank = plan.membership.rank_of(process.name)
    copies = world.durable.get(plan.restore)
    if copies is None or rank not in copies:
        world.fail("CK-1", f"{process.name} is to load {plan.restore}, which is not there")
        return
    process.numbers = copies[rank].numbers
    loaded = seen.SnapshotLoaded(
        incarnation=process.name, number=plan.number, version=copies[rank].version
    )
    world.observe(loaded)
