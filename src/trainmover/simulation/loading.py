"""A simulated load of kept state: a snapshot in a roll-back, a checkpoint in a start.

Does with three integers what worker/restoring.py does with tensors. What was loaded is shown to the
checker with the version that the bytes had, not with the one that was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover import controller
from trainmover.checks import observations as observed
from trainmover.controller.kept import TimeLine
from trainmover.protocol.messages import DiskPart, Edge, Plan, Source, Version
from trainmover.simulation.channels import CutOverWork
from trainmover.worker import events as worker_events

if TYPE_CHECKING:
    from trainmover.simulation.memory import Copy
    from trainmover.simulation.process import Process
    from trainmover.simulation.world import World


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
    loaded = observed.SnapshotLoaded(
        incarnation=process.name, number=plan.number, version=copy.version
    )
    world.observe(loaded)
    work.proceed()


def restore(process: Process, plan: Plan) -> None:
    """A fresh start from a checkpoint: this rank's state at the plan's target."""
    world = process.world
    rank = plan.membership.rank_of(process.name)
    copy = None if rank is None else _copy_of(process, plan, rank)
    if copy is None:
        world.fail("CK-1", f"{process.name} is to load {plan.restore}, which is not there")
        return
    process.numbers = copy.numbers
    loaded = observed.SnapshotLoaded(
        incarnation=process.name, number=plan.number, version=copy.version
    )
    world.observe(loaded)


def _copy_of(process: Process, plan: Plan, rank: int) -> Copy | None:
    """From this machine's disk, the disk that the plan names, or the storage of all."""
    world = process.world
    machines = [process.machine, *(part.machine for part in plan.disks if rank in part.ranks)]
    for name in machines:
        found = world.machines[name].disk.get(plan.restore, {}).get(rank)
        if found is not None and world.machines[name].is_alive:
            return found
    return world.durable.get(plan.restore, {}).get(rank)


def seen(world: World, order: controller.LookIntoStorage) -> controller.Restored | None:
    """What a look finds: the newest checkpoint of which every rank's part is somewhere."""
    lines = [TimeLine(target=Version(step=step), number=number) for step, number in order.left]
    found = whole_checkpoints(world, order)
    sound = [
        (version, name)
        for name, (version, _) in found.items()
        if not any(line.voids(version) for line in lines)
    ]
    if not sound:
        return None
    version, name = max(sound)
    holders = found[name][1]
    parts = tuple(
        DiskPart(machine=machine, folder=machine, ranks=tuple(ranks))
        for machine, ranks in sorted(holders.items())
    )
    return controller.Restored(name=name, version=version, run_id="run", disks=parts)


def whole_checkpoints(
    world: World, order: controller.LookIntoStorage
) -> dict[str, tuple[Version, dict[str, list[int]]]]:
    """Version, and ranks by the machine that has them on its disk, of what is complete."""
    disks = [disk.machine for disk in order.disks if world.machines[disk.machine].is_alive]
    names = {*world.durable, *(n for machine in disks for n in world.machines[machine].disk)}
    whole = {}
    for name in sorted(names):
        copies = dict(world.durable.get(name, {}))
        holders: dict[str, list[int]] = {}
        for machine in disks:
            mine = world.machines[machine].disk.get(name, {})
            news = [rank for rank in sorted(mine) if rank not in copies]
            if news:
                holders[machine] = news
            copies |= {rank: mine[rank] for rank in news}
        is_sound = not any(copy.is_suspect for copy in copies.values())
        if len(copies) == world.scenario.world_size and is_sound:
            whole[name] = (next(iter(copies.values())).version, holders)
    return whole
