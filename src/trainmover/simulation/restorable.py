"""What a simulated job could still be restored from: judges whether giving up was right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover import controller
from trainmover.protocol.messages import Version
from trainmover.simulation import earlier
from trainmover.simulation.loading import whole_checkpoints

if TYPE_CHECKING:
    from trainmover.simulation.world import World


def restorable_version(world: World) -> int | None:
    """Step at which every rank's state exists somewhere reachable; None if there is none."""
    found = _live_version(world)
    if found is None and world.durable:
        found = max(next(iter(copies.values())).version.step for copies in world.durable.values())
    if found is None:
        found = _version_on_disks(world)
    return found if found is not None else _kept_version(world)


def _version_on_disks(world: World) -> int | None:
    """Step of a checkpoint of which reachable machines' disks have every rank's part."""
    reachable = tuple(
        controller.Disk(machine=machine.name, host=machine.name, port=1)
        for machine in world.machine_list()
        if machine.is_agent_alive
        and machine.is_linked
        and not world.is_cut("controller", machine.name)
    )
    assert world.commander.state is not None
    kept = world.commander.state.kept
    order = controller.LookIntoStorage(
        number=0,
        is_start=not world.checker.book.committed,
        disks=reachable,
        history=kept.history,
        begun_at=kept.begun_at,
    )
    steps = [
        version.step
        for name, (version, _) in whole_checkpoints(world, order).items()
        if not world.checker.is_void(version) and earlier.may_take(order, name, version)
    ]
    return max(steps, default=None)


def _kept_version(world: World) -> int | None:
    """Step of a version that reachable agents hold of every rank."""
    ranks: dict[Version, set[int]] = {}
    for machine in world.machine_list():
        memory = machine.memory
        is_reachable = machine.is_agent_alive and machine.is_linked
        if memory is None or not is_reachable or world.is_cut("controller", machine.name):
            continue
        for rank, version in {*memory.own, *memory.peers}:
            if memory.read(rank, version) is not None and not world.checker.is_void(version):
                ranks.setdefault(version, set()).add(rank)
    whole = [v.step for v, have in ranks.items() if len(have) == world.scenario.world_size]
    return max(whole, default=None)


def _live_version(world: World) -> int | None:
    """Step at which every rank's state exists on a live, reachable process; None if there is none.

    Errs on the side of None: only processes that run and whose machine the controller can reach
    count.
    """
    now = world.schedule.now
    committed = max(world.checker.book.committed, default=0)
    plan = world.checker.book.plans.get(committed)
    if plan is None:
        return None
    here = [
        process
        for _, process in sorted(world.processes.items())
        if process.is_alive
        and process.stopped_until <= now
        and process.host.is_linked
        and world.cuts.get(world.path("controller", process.machine), 0) <= now
    ]
    members = [process for process in here if process.generation == committed]
    if not members:
        return None
    newest = max(process.life.applied for process in members)
    if newest.step == 0:
        return 0
    ranks = {process.life.rank for process in members}
    for rank in range(world.scenario.world_size):
        if rank not in ranks and world.scenario.is_sharded:
            return None
        copies = [process.personal.get((rank, newest), (0, False)) for process in members]
        if rank not in ranks and not any(is_final for _, is_final in copies):
            return None
    return newest.step
