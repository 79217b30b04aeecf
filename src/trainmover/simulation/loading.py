"""A simulated load of kept state: a snapshot in a roll-back, a checkpoint in a start.

Does with three integers what worker/restoring.py does with tensors. What was loaded is shown to the
checker with the version that the bytes had, not with the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trainmover import controller
from trainmover.checks import observations as observed
from trainmover.controller.kept import TimeLine
from trainmover.protocol.messages import DiskPart, Edge, Plan, Source, Version
from trainmover.simulation import earlier, fetching
from trainmover.simulation.channels import CutOverWork
from trainmover.worker import events as worker_events

if TYPE_CHECKING:
    from trainmover.simulation.fetching import Fetch
    from trainmover.simulation.memory import Copy
    from trainmover.simulation.process import Process
    from trainmover.simulation.world import World

DISK_LIMIT_S = 20.0
"""Longest wait for a byte of another machine's agent that reads its disk."""


def ask(process: Process, work: CutOverWork) -> None:
    """Fetch this rank's snapshot from the agent that the plan names."""
    if work.asked:
        return
    rank = work.plan.membership.rank_of(process.name)
    mine = [source for source in work.plan.sources if source.rank == rank]
    if not mine:
        process.world.fail("I9", f"plan {work.plan.number} has no source for rank {rank}")
        return
    fetch = fetching.begin(process, work, mine[0].machine)
    if fetch is None:
        return
    work.asked = True
    process.later(process.world.scenario.move_s, lambda: _arrive(process, work, fetch, mine[0]))


def _arrive(process: Process, work: CutOverWork, fetch: Fetch, source: Source) -> None:
    if process.fetch is not fetch:
        return
    if fetching.is_dark(process, source.machine):
        process.later(fetching.LIMIT_S, lambda: fetching.end(process, fetch))
        return  # the cut-over is stuck on it
    if process.cut_over is work:
        _take(process, work, source)
    fetching.end(process, fetch)


def _take(process: Process, work: CutOverWork, source: Source) -> None:
    world, plan = process.world, work.plan
    memory = world.machines[source.machine].memory
    is_there = memory is not None and memory.is_alive()
    copy = memory.read(source.rank, plan.target) if memory is not None and is_there else None
    if copy is None:
        edge = Edge(peer=source.machine, reason="the snapshot could not be fetched")
        process.feed(worker_events.CutOverBroke(number=plan.number, edge=edge))
        return
    work.is_loaded = True
    _load(process, plan, copy)
    work.proceed()


def _load(process: Process, plan: Plan, copy: Copy) -> None:
    process.numbers = copy.numbers
    loaded = observed.SnapshotLoaded(
        incarnation=process.name, number=plan.number, version=copy.version
    )
    process.world.observe(loaded)


# --------------------------------------------------------------------------- checkpoints


def restore(process: Process, plan: Plan | None, then: Callable[[], None]) -> None:
    """A start of `main`, from a checkpoint if there is one: this rank's state at its target."""
    rank = plan.membership.rank_of(process.name) if plan is not None else None
    if plan is None or rank is None:
        then()
        return
    world = process.world
    here = world.machines[process.machine].disk.get(plan.restore, {}).get(rank)
    copy = here or world.durable.get(plan.restore, {}).get(rank)
    holders = [part.machine for part in plan.disks if rank in part.ranks]
    if copy is not None:
        _load_checkpoint(process, plan, copy, then)
    elif holders:
        fetch = partial(_fetch_part, process, plan, holders[0], then)
        process.later(world.scenario.move_s, fetch)
    else:
        world.fail("CK-1", f"{process.name} is to load {plan.restore}, which is not there")


def _fetch_part(process: Process, plan: Plan, holder: str, then: Callable[[], None]) -> None:
    """From another machine's disk, through its agent."""
    world, rank = process.world, process.life.rank
    machine = world.machines[holder]
    healed_at = world.cuts.get(world.path(process.machine, holder), 0)
    if healed_at > world.schedule.now:
        wait_s = min(DISK_LIMIT_S, (healed_at - world.schedule.now) / 1e9)
        is_over = wait_s == DISK_LIMIT_S
        again = partial(_fetch_part, process, plan, holder, then)
        lose = partial(_lose_disk, process, holder)
        process.later(wait_s, lose if is_over else again)
        return
    copy = machine.disk.get(plan.restore, {}).get(rank)
    if copy is not None and machine.is_agent_alive:
        _load_checkpoint(process, plan, copy, then)
    else:
        process.later(
            DISK_LIMIT_S if machine.is_dark else 0.001, partial(_lose_disk, process, holder)
        )


def _lose_disk(process: Process, holder: str) -> None:
    """Not the script's fault: the job is led back."""
    failed = worker_events.MainFailed(
        rank=process.life.rank,
        step=process.life.applied.step,
        text="Traceback",
        error=f"DiskLost: disk of {holder} gave no answer",
        was_running_out=False,
        is_machine_caused=True,
    )
    process.feed(failed)


def _load_checkpoint(process: Process, plan: Plan, copy: Copy, then: Callable[[], None]) -> None:
    earlier.check(process.world, plan.restore, copy.version)
    _load(process, plan, copy)
    then()


def seen(world: World, order: controller.LookIntoStorage) -> controller.Restored | None:
    """What a look finds: the newest checkpoint of which every rank's part is somewhere."""
    lines = [TimeLine(target=Version(step=step), number=number) for step, number in order.left]
    found = whole_checkpoints(world, order)
    sound = [
        (version, name)
        for name, (version, _) in found.items()
        if earlier.may_take(order, name, version) and not any(line.voids(version) for line in lines)
    ]
    if not sound:
        return None
    version, name = max(sound)
    holders = found[name][1]
    parts = tuple(
        DiskPart(machine=machine, folder=machine, ranks=tuple(ranks))
        for machine, ranks in sorted(holders.items())
    )
    run = earlier.RUN if earlier.is_ours(name) else "run"
    return controller.Restored(name=name, version=version, run_id=run, history=(run,), disks=parts)


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
