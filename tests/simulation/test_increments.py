"""Worlds whose ranks back up every step: a loss takes nobody back, and never to a wrong version."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulation.regressions import aimed

from trainmover.protocol import exits
from trainmover.protocol.journal import PlanRecorded
from trainmover.protocol.messages import Plan
from trainmover.simulation import increments
from trainmover.simulation.channels import CutOverWork, Part
from trainmover.simulation.process import Process
from trainmover.simulation.runner import judge, run_seed, run_world
from trainmover.simulation.scenario import Fault, Scenario
from trainmover.simulation.world import World

SEEDS = 6
LATE = Fault(4.0, False, "kill_worker", 0.0, "")
MACHINE = Fault(4.0, False, "kill_machine", 0.0, "")
IN_THE_TAIL = Fault(4.0, False, "kill_worker", 0.0, "tail")
IN_THE_CUT_OVER = Fault(4.2, False, "kill_worker", 0.0, "cut_over")
LATER = Fault(9.0, False, "kill_machine", 0.0, "")
"""Far enough behind the first loss that its joiner, however slow, has got its state."""


def backed_up(seed: int, *faults: Fault, kept: int = 16) -> Scenario:
    """A job without replicas, with a snapshot of every fifth step."""
    scenario = aimed(seed, *faults, machines=3, steps=24)
    return replace(
        scenario,
        is_sharded=True,
        snapshot_every=5,
        step_s=0.3,
        increments_kept=kept,
        has_tail_collective=False,
        slow_tail_s=0.0,
    )


def plans(world: World) -> list[Plan]:
    """For losses that cost a rank."""
    found = [r.plan for r in world.commander.journal if isinstance(r, PlanRecorded)]
    return [plan for plan in found if plan.kind == "unplanned" and plan.joiners]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "faults",
    [(LATE,), (MACHINE,), (IN_THE_TAIL,), (MACHINE, LATER), (LATE, IN_THE_CUT_OVER)],
    ids=["worker", "machine", "tail", "two", "cut-over"],
)
def test_losses_are_played_again(faults: tuple[Fault, ...]) -> None:
    played = 0
    for seed in range(SEEDS):
        world = World(backed_up(seed, *faults))
        run_world(world)
        outcome = judge(world)
        assert not outcome.violations, outcome
        assert outcome.code == exits.COMPLETED
        made = plans(world)
        played += sum(source.kind == "increments" for plan in made for source in plan.sources)
        if len(faults) == 1 or LATER in faults:
            assert not any(plan.is_rollback for plan in made), (seed, made)
    assert played, "no seed lost a rank: victims were standbys"


@pytest.mark.timeout(300)
def test_too_few_updates_take_all_back_and_never_to_a_wrong_version() -> None:
    back = 0
    for seed in range(SEEDS):
        world = World(backed_up(seed, replace(LATE, at_s=5.2), kept=3))
        run_world(world)
        assert not judge(world).violations
        back += sum(plan.is_rollback for plan in plans(world))
    assert back, "updates of one step reach no snapshot of every fifth"


@pytest.mark.timeout(300)
def test_an_update_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = increments.play

    def dishonest(process: Process, work: CutOverWork, part: Part) -> None:
        honest(process, work, replace(part, updates=part.updates[1:]))

    monkeypatch.setattr(increments, "play", dishonest)
    found = [run_seed(seed, scenario=backed_up(seed, LATE)).violations for seed in range(SEEDS)]
    assert any(found)
