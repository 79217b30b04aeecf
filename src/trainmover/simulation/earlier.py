"""A run before the simulated one: what it has left on machines' own disks.

Its machines may have come back under other names, one of them late or never; some of its newest
checkpoints lack a part. What this run begins from, and may go back to, is decided by the real
deciders and by `loading.seen`; here is what must not be taken.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from trainmover.protocol.journal import StartChosen
from trainmover.protocol.messages import Version
from trainmover.simulation import numbers
from trainmover.simulation.memory import Copy

if TYPE_CHECKING:
    from trainmover.controller import LookIntoStorage
    from trainmover.simulation.scenario import Scenario
    from trainmover.simulation.world import World

RUN = "before"
LATE_S = (0.0, 0.0, 0.0, 8.0, 30.0)
"""After which one of the machines is switched on."""


def leave(world: World) -> dict[str, float]:
    """Fill the disks; how much later than the others which machine is switched on."""
    scenario = world.scenario
    if not scenario.earlier_steps:
        return {}
    draw = random.Random(f"earlier {scenario.seed}")
    names = [machine.name for machine in world.machine_list()]
    run = _states(scenario)
    every = scenario.checkpoint_every
    for step in range(every, scenario.earlier_steps + 1, every):
        owners = draw.sample(names, scenario.machines)
        version = Version(step=step, lineage=1 + step // 6)
        for rank, state in enumerate(run[step]):
            copy = Copy(version, state, _identity(scenario, rank), is_suspect=False)
            machine = world.machines[owners[rank // scenario.workers_per_machine]]
            if draw.random() < 0.95:
                machine.disk.setdefault(f"{RUN}-{step}", {})[rank] = copy
    return {draw.choice(names): draw.choice(LATE_S)}


def _states(scenario: Scenario) -> list[list[numbers.Numbers]]:
    return numbers.undisturbed(
        scenario.world_size,
        scenario.earlier_steps,
        changes_in_tail=scenario.changes_in_tail,
        is_sharded=scenario.is_sharded,
        has_tail_collective=scenario.has_tail_collective,
    )


def _identity(scenario: Scenario, rank: int) -> str:
    return f"shard {rank}" if scenario.is_sharded else "all"


def is_ours(name: str) -> bool:
    """Whether a checkpoint is of the earlier run."""
    return name.startswith(RUN)


def may_take(order: LookIntoStorage, name: str, version: Version) -> bool:
    """Whether a look may find it: for a start all, later nothing behind where the job began."""
    if order.is_start or not is_ours(name):
        return True
    begun = order.begun_at
    is_before = version.step <= begun.step and version.lineage <= begun.lineage
    return RUN in order.history and is_before


def check(world: World, name: str, version: Version) -> None:
    """K5 over starts: what lies behind where this run began, it has left."""
    if not is_ours(name):
        return
    begun = [each for each in world.commander.journal if isinstance(each, StartChosen)]
    if not begun or version > begun[-1].version:
        where = begun[-1].version if begun else "its own beginning"
        world.fail("K5", f"{name} is loaded by a run that began at {where}")
