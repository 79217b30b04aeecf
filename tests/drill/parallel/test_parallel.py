"""Every kind of parallelism: planned moves and losses change no number.

`make test` takes a pipeline through a planned move, a lost machine and a lost worker (losses
without a replica: `test_every_pair`); those marked long lose every machine in turn, of every kind,
eager and compiled.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.drill.parallel import kinds
from tests.drill.parallel.kinds import Parallel
from tests.drill.parallel.losses import Plan, assert_outlives, assert_stops_by_name

from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 160
SHORT_STEPS = 100
SHORT = (kinds.TP, kinds.PIPELINE, kinds.EXPERTS)


def named(kind: Parallel) -> str:
    return kind.name


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.name, marks=[] if kind is kinds.PIPELINE else [pytest.mark.long])
        for kind in SHORT
    ],
)
def test_a_move_and_losses_change_no_number(kind: Parallel, tmp_path: Path) -> None:
    """The machine that moved away comes back and takes the killed one's place."""
    wanted = kind.request(steps=SHORT_STEPS, standbys=1)
    assert_outlives(kind, wanted, Plan(moved=(1,), killed=(2,), worker=0), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("does_compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("ranks", [(0, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", kinds.REPLICATED, ids=named)
def test_every_machine_in_turn(
    kind: Parallel, ranks: tuple[int, int], does_compile: bool, tmp_path: Path
) -> None:
    """Two machines are killed one after the other, others are moved, a worker dies."""
    if kind.machines == 8:
        ranks = (ranks[0] * 2, ranks[1] * 2 + 1)
    wanted = kind.request(steps=STEPS, standbys=2, does_compile=does_compile)
    plan = Plan(moved=(ranks[1],), killed=ranks, worker=ranks[0])
    assert_outlives(kind, wanted, plan, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", kinds.UNREPLICATED, ids=named)
def test_a_loss_without_replica(kind: Parallel, tmp_path: Path) -> None:
    """All ranks go back to the newest snapshot that the agents hold, and repeat the steps since."""
    wanted = kind.request(steps=STEPS, standbys=1)
    wanted = replace(wanted, settings=(("snapshot.cadence", "every 10 steps"),))
    assert_outlives(kind, wanted, Plan(killed=(1,), is_alone=True), tmp_path)


def test_a_loss_without_replica_or_snapshot(tmp_path: Path) -> None:
    """Named and stopped: nobody has the rank's state."""
    kind = kinds.UNREPLICATED[0]
    wanted = replace(
        kind.request(steps=STEPS, standbys=1), settings=(("snapshot.cadence", "never"),)
    )
    assert_stops_by_name(wanted, 1, exits.CANNOT_RESTORE, tmp_path / "lost")


@pytest.mark.long
@pytest.mark.parametrize("kind", kinds.UNREPLICATED, ids=named)
def test_a_move_without_replica(kind: Parallel, tmp_path: Path) -> None:
    """The leaver itself hands its state over."""
    wanted = kind.request(steps=STEPS, standbys=1)
    assert_outlives(kind, wanted, Plan(moved=(1, 0)), tmp_path)
