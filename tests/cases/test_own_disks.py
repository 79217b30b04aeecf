"""Hosts that share nothing: what each has on its own disk restarts the job, EXACT."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from tests.cases.exact import assert_exact
from tests.cases.hosts import Hosts, committed
from tests.cases.runs import undisturbed
from tests.waiting import eventually
from trainmover.daemons.own_disks import READ_PHASE
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STEPS = 40
EVERY = 8


def first_life(root: Path) -> str:
    """Killed with a checkpoint on the disks only; its name."""
    disks = {"m0": root / "a", "m1": root / "b"}
    hosts = Hosts(root / "one", root, disks, steps=STEPS, every=EVERY)
    with hosts.held_behind(EVERY + 4) as job:
        name = job.wait_for_disks(EVERY)
        job.kill()
    shutil.rmtree(root / "shared", ignore_errors=True)
    sides = [path.name for path in root.glob(f"*/*/{name}/*.msgpack")]
    assert sorted(sides) == ["rank-00000.msgpack", "rank-00001.msgpack"], "each its own part"
    bulk = list(root.glob(f"*/*/{name}/*.safetensors"))
    assert len(bulk) == 1, "one of two replicas: the other rank has to fetch it from there"
    return name


def moved(root: Path) -> dict[str, Path]:
    """The disks at the other machine each."""
    return {"m0": root / "b", "m1": root / "a"}


def assert_from_moved_disks(told: str, name: str) -> None:
    assert f"starts from checkpoint {name}" in told
    assert "from disk of m0 (m1's)" in told
    assert "from disk of m1 (m0's)" in told
    assert "durable" not in told


def test_disks_that_only_their_own_machine_sees_restart_the_job(tmp_path: Path) -> None:
    """No storage is left, and the machines come back under each other's name."""
    name = first_life(tmp_path)
    with Hosts(tmp_path / "two", tmp_path, moved(tmp_path), steps=STEPS, every=STEPS) as job:
        codes = job.end()
        told = job.text()
    assert set(codes.values()) == {0}, told
    assert_from_moved_disks(told, name)
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)


@pytest.mark.long
def test_a_disk_that_is_lost_is_made_up_for_by_the_storage_or_named(tmp_path: Path) -> None:
    name = first_life(tmp_path)
    disks = moved(tmp_path)
    with Hosts(tmp_path / "two", tmp_path, disks, steps=STEPS, every=EVERY) as job:
        eventually(
            lambda: committed(tmp_path / "shared") != [], "a copy on the storage", timeout_s=60
        )
        job.kill()
        assert_from_moved_disks(job.text(), name)
    newest = committed(tmp_path / "shared")[-1].name
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "shared").rename(tmp_path / "aside")
    with Hosts(tmp_path / "three", tmp_path, disks, steps=STEPS, every=STEPS) as job:
        codes = job.end()
        told = job.text()
    assert codes["controller"] == exits.START_FAILED, told
    assert "rank-00000.msgpack is nowhere whole" in told
    assert "Traceback" not in told

    (tmp_path / "aside").rename(tmp_path / "shared")
    with Hosts(tmp_path / "four", tmp_path, disks, steps=STEPS, every=STEPS) as job:
        codes = job.end()
        told = job.text()
    assert set(codes.values()) == {0}, told
    assert f"starts from checkpoint {newest}" in told
    assert "from durable" in told
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_agent_that_dies_or_is_stopped_while_it_serves_a_load_costs_no_step(
    tmp_path: Path, how: str
) -> None:
    """The other machine's rank reads its state there. Nothing is left on the storage."""
    name = first_life(tmp_path)
    disks, faults = moved(tmp_path), f"{how}@{READ_PHASE}:m1"
    with Hosts(tmp_path / "two", tmp_path, disks, steps=STEPS, every=STEPS, faults=faults) as job:
        struck = psutil.Process(job.processes["m1"].pid)
        ends = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
        eventually(lambda: struck.status() in ends, "m1's agent is struck", timeout_s=60)
        log = job.folder / "controller" / "logs" / "controller.log"
        eventually(lambda: "freeze " in log.read_text(), "the loss is noticed", timeout_s=60)
        job.start_again("m1")
        codes = job.end(120.0)
        told = job.text()
    assert set(codes.values()) == {0}, told
    assert_from_moved_disks(told, name)
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)


@pytest.mark.long
def test_without_the_disk_that_alone_has_a_part_the_job_goes_back_further(tmp_path: Path) -> None:
    """A restarted run has saved nothing when all memory goes, and one machine for good."""
    disks = {"m0": tmp_path / "a", "m1": tmp_path / "b"}
    shared = tmp_path / "shared"
    hosts = Hosts(tmp_path / "one", tmp_path, disks, steps=STEPS, every=EVERY)
    with hosts.held_behind(EVERY + 4, 2 * EVERY + 4) as job:
        eventually(lambda: committed(shared) != [], "a copy on the storage", timeout_s=60)
        job.let_go(EVERY + 4)
        newest = job.wait_for_disks(2 * EVERY)
        job.kill()
    older, *others = (each.name for each in committed(shared))
    for name in others:
        shutil.rmtree(shared / name)
    again = 2 * EVERY + 1

    hosts = Hosts(tmp_path / "two", tmp_path, disks, steps=STEPS, every=STEPS)
    with hosts.held_behind(again) as job:
        job.wait_until_held(again)  # behind the first steps of the run that was started again
        assert f"starts from checkpoint {newest}" in job.text()
        job.lose("m1")
        job.lose("m0")
        job.let_go(again)
        job.join("m0", disks["m0"], name="m0 again")
        job.join("m2", tmp_path / "c")
        codes = job.end()
        told = job.text()
    assert (codes["controller"], codes["m0 again"], codes["m2"]) == (0, 0, 0), told
    assert f"checkpoint {older} was found" in told
    assert f"checkpoint {newest} can't be used" in told
    assert_exact(tmp_path / "out", undisturbed((), STEPS, 2), ranks=2, steps=STEPS)
