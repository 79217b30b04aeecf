"""Every rank is a victim once, and death in every window of a step costs no number."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests import tiny

from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

WINDOWS = (
    "forward:0",
    "backward:1",
    "gate:6",
    "optimizer:12",
    "scheduler:18",
    "between:24",
    "every:29",
    "every_late:39",
    "save:49",
    "forward:55",
    "backward:60",
)
"""Of one job, each with another victim: it must be back before the next one is reached."""


def end(job: RunningJob) -> JobResult:
    """The job has completed and left nothing behind."""
    result = job.wait_until_done()
    job.assert_no_leftovers()
    assert result.code == 0, result.output
    return result


def test_every_rank_leaves_once_and_its_machine_returns(tmp_path: Path) -> None:
    order = random.Random(tiny.seed()).sample(range(4), 4)
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}: ranks leave in the order {order}")
    wanted = tiny.request("--steps", "400")
    with RunningJob(wanted, tmp_path / "job") as job:
        for rank in order:
            job.wait_for_standby()
            machine = job.member(rank).machine
            before = {m.rank: m.incarnation for m in job.members()}
            job.switchover((machine,))
            after = {m.rank: m.incarnation for m in job.members()}
            assert {r for r in before if before[r] != after[r]} == {rank}
            job.wait_for(
                lambda left=machine: left in job.ready_standbys(), f"{machine} returns", 60.0
            )
        result = end(job)
    assert [incident.kind for incident in result.incidents] == ["planned"] * 4
    tiny.assert_identical(result, wanted, tmp_path)


def test_every_rank_is_killed_once_and_respawned_in_place(tmp_path: Path) -> None:
    order = random.Random(tiny.seed() + 1).sample(range(4), 4)
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}: ranks die in the order {order}")
    wanted = tiny.request("--steps", "400")
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        for count, rank in enumerate(order, 1):
            job.wait_for_step(job.last_step() + 4)
            machine = job.member(rank).machine
            job.kill_worker(rank, is_alone=count % 2 == 0)
            job.wait_for_incidents(count)
            # C94: the process alone has died, so its machine keeps the rank.
            assert job.member(rank).machine == machine
            assert job.wait_for_standby() == ["m4"]
        result = end(job)
    assert {incident.kind for incident in result.incidents} == {"respawn"}
    tiny.assert_identical(result, wanted, tmp_path)


def test_death_in_every_window_of_a_step(tmp_path: Path) -> None:
    draw = random.Random(tiny.seed() + 2)
    victims = [(window, 0 if "save" in window else draw.randrange(4)) for window in WINDOWS]
    text = ",".join(f"{window}:{rank}" for window, rank in victims)
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}: TINY_DIE={text}")
    arguments = ("--steps", "70", "--every", "10", "--save", "{folder}/hand-made.pt")
    wanted = tiny.request(*arguments, standbys=0, disturbance=(("TINY_DIE", text),))
    with RunningJob(wanted, tmp_path / "job") as job:
        result = end(job)
    struck = {path.name for path in (tmp_path / "job" / "faults").iterdir()}
    assert len(struck) == len(WINDOWS), f"struck only at {sorted(struck)}"
    assert len(result.incidents) == len(WINDOWS)
    tiny.assert_identical(result, wanted, tmp_path)


def test_death_in_front_of_a_tail_collective_drops_its_value_and_names_it(tmp_path: Path) -> None:
    arguments = ("--steps", "60", "--tail")
    wanted = tiny.request(*arguments, standbys=0, disturbance=(("TINY_DIE", "tail:9:2"),))
    with RunningJob(wanted, tmp_path / "job") as job:
        result = end(job)
    assert len(result.incidents) == 1
    assert "tiny.py" in result.output, "the collective behind the gate is named with its place"
    tiny.assert_identical(result, wanted, tmp_path)


@pytest.mark.parametrize("window", ["build:-1:1", "groups:-1:1", "forward:0:1"])
def test_c109_death_before_and_in_the_first_collective(window: str, tmp_path: Path) -> None:
    arguments = ("--steps", "60", "--groups")
    wanted = tiny.request(*arguments, standbys=0, disturbance=(("TINY_DIE", window),))
    with RunningJob(wanted, tmp_path / "job") as job:
        result = end(job)
    tiny.assert_identical(result, wanted, tmp_path)
