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
LAYOUTS = [kind for kind in kinds.UNREPLICATED if kind.name in {"fsdp2", "tp-alone", "pp-alone"}]
"""Experts of equal names and first values pass for replicas; ZeRO communicates in its step."""


def kill_machine_of(job: RunningJob, rank: int, count: int) -> None:
    """Then wait until the job trains without it."""
    job.kill_machine(job.member(rank).machine)
    job.wait_for_incidents(count)


def sources_of(job: RunningJob, rank: int) -> list[str]:
    """What the rank was restored from, incident by incident."""
    return [
        role.source for incident in job.incidents() for role in incident.roles if role.rank == rank
    ]


def test_the_machine_with_the_backup_dies_first(tmp_path: Path) -> None:
    """Rank 1 is backed up by rank 2: what dies second is what the dead one held."""
    wanted = backed_up("--optimizer", "sgd", standbys=2, steps=90)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby(2)
        wait_until_backed_up(job)
        kill_machine_of(job, 2, 1)
        job.wait_for_step(job.last_step() + SECOND_LOSS_STEPS)
        kill_machine_of(job, 1, 2)
        result = end(job)
        assert sources_of(job, 1)[-1] == "increments"
    assert_nothing_is_lost(result, wanted, tmp_path, ["standby", "standby"])


def test_a_worker_is_killed_behind_the_gate(tmp_path: Path) -> None:
    """In front of its update: what it was about to apply is held already."""
    wanted = backed_up(
        "--kind", "alone", "--scaler", standbys=0, disturbance=((VARIABLE, "kill@1:30:tail"),)
    )
    with RunningJob(wanted, tmp_path / "job") as job:
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["respawn"])


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_machine_in_turn(rank: int, tmp_path: Path) -> None:
    draw = random.Random(f"{tiny.seed()} {rank}")
    wanted = backed_up()
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_backed_up(job)
        step = draw.randrange(5, 40)
        print(f"seed {tiny.seed()}: rank {rank}'s machine behind step {step}")
        job.wait_for_step(step)
        kill_machine_of(job, rank, 1)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["standby"])


@pytest.mark.long
@pytest.mark.parametrize("place", ["1", "gate", "tail"])
@pytest.mark.parametrize("step", [25, 33, 34], ids=["between", "at-a-snapshot", "behind-one"])
@pytest.mark.parametrize("kind", ["sharded", "alone"])
def test_a_worker_dies_anywhere(kind: str, step: int, place: str, tmp_path: Path) -> None:
    """With 64 increments kept, snapshots are taken at 1 and every 32 steps."""
    rule = f"kill@2:{step}:{place}"
    wanted = backed_up("--kind", kind, standbys=0, disturbance=((VARIABLE, rule),))
    with RunningJob(wanted, tmp_path / "job") as job:
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["respawn"])


@pytest.mark.long
@pytest.mark.parametrize("kind", LAYOUTS, ids=[kind.name for kind in LAYOUTS])
def test_other_layouts(kind: kinds.Parallel, tmp_path: Path) -> None:
    wanted = replace(kind.request(steps=120, standbys=1), settings=EVERY_STEP)
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_backed_up(job)
        kill_machine_of(job, 1, 1)
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["standby"])


@pytest.mark.long
def test_the_same_rank_is_lost_again_at_once(tmp_path: Path) -> None:
    """A joiner hands on what it was given."""
    rules = "kill@1:30:1;kill@1:36:gate;kill@2:43:tail"
    wanted = backed_up(standbys=0, disturbance=((VARIABLE, rules),))
    with RunningJob(wanted, tmp_path / "job") as job:
        result = end(job)
    assert_nothing_is_lost(result, wanted, tmp_path, ["respawn"] * 3)


@pytest.mark.long
def test_a_state_that_also_changes_elsewhere_is_named_and_goes_back(tmp_path: Path) -> None:
    often = ("snapshot.cadence", "every 5 steps")
    wanted = backed_up("--shrink", standbys=0, settings=(*EVERY_STEP, often))
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_backed_up(job)
        job.wait_for_step(20)
        job.kill_worker(1)
        result = end(job)
    assert [incident.kind for incident in result.incidents] == ["rollback"]
    assert "not backed up one by one" in result.output
    assert "changes behind optimizer.step()" in result.output


@pytest.mark.long
def test_ranks_with_a_replica_ship_nothing_unless_asked(tmp_path: Path) -> None:
    wanted = tiny.request(
        machines=2, standbys=1, settings=(("snapshot.increments", "always"),), workers_per_machine=1
    )
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.wait_for_step(20)
        kill_machine_of(job, 1, 1)
        result = end(job)
        assert sources_of(job, 1) == ["replica"]
    tiny.assert_identical(result, wanted, tmp_path)
