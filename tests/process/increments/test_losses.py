"""Ranks that have no replica and back up every step: a loss costs no step, same numbers.

`make test` takes two machines lost in a row, the backup first, and a worker killed behind a gate;
those marked long take every machine in turn, and the other ways of updating.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from tests.drill.parallel import kinds
from tests.holding import held_behind, let_go, let_run, wait_until_held
from tests.process.increments.jobs import (
    EVERY_STEP,
    assert_nothing_is_lost,
    backed_up,
    end,
    wait_until_backed_up,
)
from trainmover.drills.harness import RunningJob
from trainmover.worker.drill_hooks import VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SECOND_LOSS_STEPS = 3
HELD_AT = 10
"""Step behind which ranks wait until what they need to lose one is there."""
LAYOUTS = [kind for kind in kinds.UNREPLICATED if kind.name in {"fsdp2", "tp-alone", "pp-alone"}]
"""Experts of equal names and first values pass for replicas; ZeRO communicates in its step."""


def lose(job: RunningJob, rank: int, held: int) -> None:
    """A rank's machine, while all hold and every update since a snapshot can be played."""
    job.wait_for_standby()
    wait_until_held(job, held, 3)
    wait_until_backed_up(job)
    job.kill_machine(job.member(rank).machine)
    let_run(job, held)
    job.wait_for_incidents(1)


def sources_of(job: RunningJob, rank: int) -> list[str]:
    """What the rank was restored from, incident by incident."""
    return [
        role.source for incident in job.incidents() for role in incident.roles if role.rank == rank
    ]


def test_the_machine_with_the_backup_dies_first(tmp_path: Path) -> None:
    """Rank 1 is backed up by rank 2: what dies second is what the dead one held."""
    held = held_behind(20, 20 + SECOND_LOSS_STEPS)
    wanted = backed_up("--optimizer", "sgd", standbys=2, steps=90, disturbance=held)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(2)
        wait_until_held(job, 20, 3)
        wait_until_backed_up(job)
        job.kill_machine(job.member(2).machine)
        let_go(job, 20)
        job.wait_for_incidents(1)
        wait_until_held(job, 20 + SECOND_LOSS_STEPS, 3)
        job.kill_machine(job.member(1).machine)
        let_run(job, 20 + SECOND_LOSS_STEPS)
        job.wait_for_incidents(2)
        result = end(job)
        assert sources_of(job, 1)[-1] == "increments"
    assert_nothing_is_lost(result, wanted, tmp_path, ["standby", "standby"])


def test_a_worker_is_killed_behind_the_gate(tmp_path: Path) -> None:
    """In front of its update: what it was about to apply is held already."""
    struck = ((VARIABLE, "kill@1:30:tail"), *held_behind(HELD_AT))
    wanted = backed_up("--kind", "alone", "--scaler", standbys=0, disturbance=struck)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, HELD_AT, 3)
        wait_until_backed_up(job)
        let_run(job, HELD_AT)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["respawn"])


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_machine_in_turn(rank: int, tmp_path: Path) -> None:
    draw = random.Random(f"{tiny.seed()} {rank}")
    step = draw.randrange(5, 40)
    print(f"seed {tiny.seed()}: rank {rank}'s machine behind step {step}")
    wanted = backed_up(disturbance=held_behind(step))
    with RunningJob(wanted, tmp_path / "job") as job:
        lose(job, rank, step)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["standby"])


@pytest.mark.long
@pytest.mark.parametrize("place", ["1", "gate", "tail"])
@pytest.mark.parametrize("step", [25, 33, 34], ids=["between", "at-a-snapshot", "behind-one"])
@pytest.mark.parametrize("kind", ["sharded", "alone"])
def test_a_worker_dies_anywhere(kind: str, step: int, place: str, tmp_path: Path) -> None:
    """With 64 increments kept, snapshots are taken at 1 and every 32 steps."""
    struck = ((VARIABLE, f"kill@2:{step}:{place}"), *held_behind(HELD_AT))
    wanted = backed_up("--kind", kind, standbys=0, disturbance=struck)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, HELD_AT, 3)
        wait_until_backed_up(job)
        let_go(job, HELD_AT)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["respawn"])


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS, ids=[kind.name for kind in LAYOUTS])
def test_other_layouts(kind: kinds.Parallel, tmp_path: Path) -> None:
    wanted = replace(kind.request(steps=120, standbys=1), settings=EVERY_STEP)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_backed_up(job)
        job.kill_machine(job.member(1).machine)
        job.wait_for_incidents(1)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["standby"])


@pytest.mark.long
def test_the_same_rank_is_lost_again_at_once(tmp_path: Path) -> None:
    """A joiner hands on what it was given."""
    rules = "kill@1:30:1;kill@1:36:gate;kill@2:43:tail"
    struck = ((VARIABLE, rules), *held_behind(HELD_AT))
    wanted = backed_up(standbys=0, disturbance=struck)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, HELD_AT, 3)
        wait_until_backed_up(job)
        let_go(job, HELD_AT)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["respawn"] * 3)


@pytest.mark.long
def test_a_state_that_also_changes_elsewhere_is_named_and_goes_back(tmp_path: Path) -> None:
    often = ("snapshot.cadence", "every 5 steps")
    settings = (*EVERY_STEP, often)
    wanted = backed_up("--shrink", standbys=0, settings=settings, disturbance=held_behind(20))
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, 20, 3)
        wait_until_backed_up(job)
        job.kill_worker(1)
        let_run(job, 20)
        result = end(job)
    assert [incident.kind for incident in result.incidents] == ["rollback"]
    assert "not backed up one by one" in result.output
    assert "changes behind optimizer.step()" in result.output


@pytest.mark.long
def test_ranks_with_a_replica_ship_nothing_unless_asked(tmp_path: Path) -> None:
    always = (("snapshot.increments", "always"),)
    wanted = tiny.request(machines=2, standbys=1, settings=always, workers_per_machine=1)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.wait_for_step(20)
        job.kill_machine(job.member(1).machine)
        job.wait_for_incidents(1)
        result = end(job)
        assert sources_of(job, 1) == ["replica"]
    tiny.assert_identical(result, wanted, tmp_path)
