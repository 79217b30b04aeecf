"""State comes back from agents' memory or a checkpoint, decided for all ranks at once: EXACT."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact
from tests.cases.runs import committed, end, request, undisturbed
from tests.holding import TRACED, let_go, wait_until_held, wait_until_told
from trainmover.daemons.run_directory import MachineFile, read_struct
from trainmover.drills import victims
from trainmover.drills.harness import RunningJob
from trainmover.protocol.journal import IncidentReport
from trainmover.protocol.snapshot_image import HEADER_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SHARDED = ("--spread", "fsdp2")
STEPS = 40
HOLD_AT = 22
OFTEN = ("snapshot.cadence", "every 5 steps")


def wait_for(job: RunningJob, what: str, least: int) -> int:
    """Until the status has a step of at least `least` for `what`; that step."""

    def found() -> int | None:
        step = int((job.status() or {}).get(what, -1))
        return step if step >= least else None

    return job.wait_for(found, f"{what} {least}")


def damage_snapshots(pid: int) -> int:
    """Turn a bit in the bulk of each snapshot that a worker shares with its agent; their count."""
    damaged = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:trainmover-snapshot" not in os.readlink(link):
                continue
            memory = os.open(link, os.O_RDWR)
        except FileNotFoundError:
            continue  # closed while we looked
        try:
            inode = os.fstat(memory).st_ino  # each is open twice, and two turns are none
            if inode not in damaged:
                (byte,) = os.pread(memory, 1, HEADER_BYTES)
                os.pwrite(memory, bytes([byte ^ 1]), HEADER_BYTES)
                damaged.add(inode)
        finally:
            os.close(memory)
    return len(damaged)


def served(report: IncidentReport) -> dict[int, str]:
    """Who gave each rank its state, as the incident tells."""
    return {role.rank: role.served_by for role in report.roles}


def test_a_damaged_snapshot_is_fetched_from_the_peer_that_holds_a_copy(tmp_path: Path) -> None:
    """C142: the memory of rank 0 is damaged, node 1 is lost; one version for both, EXACT."""
    held = ("--stop-at", "2", str(HOLD_AT))
    settings = (("snapshot.cadence", "every 1000 steps"), TRACED)
    wanted = request(*SHARDED, *held, steps=STEPS, standbys=1, settings=settings)
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_told(job, "TakeSnapshot", 1)  # behind the start; no other one is taken
        let_go(job, 2)
        job.wait_for_standby()
        wait_until_held(job, HOLD_AT)
        wait_for(job, "snapshot_copied_step", 1)
        pid, _ = job.worker(0)
        assert damage_snapshots(pid) >= 1
        job.kill_worker(1)
        let_go(job, HOLD_AT)
        job.wait_for_incidents(1)
        result = end(job)
    sources = [served(report) for report in result.incidents]
    assert "m1" in {found[0] for found in sources if 0 in found}, sources
    assert_exact(tmp_path / "job" / "out", undisturbed(SHARDED, STEPS, 2), ranks=2, steps=STEPS)


@pytest.mark.long
def test_where_some_ranks_lack_snapshots_all_take_the_checkpoint(tmp_path: Path) -> None:
    """C142: nobody mixes memory and storage. Copies are switched off, machine 1 goes."""
    wanted = request(
        *SHARDED,
        *("--stop-at", str(HOLD_AT)),
        steps=STEPS,
        standbys=1,
        flags=("--checkpoints", str(tmp_path / "checkpoints")),
        settings=(OFTEN, ("snapshot.peers", "0"), ("checkpoint.cadence", "every 10 steps")),
    )
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        wait_until_held(job, HOLD_AT)
        wait_for(job, "checkpoint_step", 1)
        job.kill_machine("m1")
        let_go(job, HOLD_AT)
        job.wait_for_incidents(1)
        result = end(job)
    (report,) = result.incidents
    assert {role.source for role in report.roles} == {"checkpoint"}
    assert report.resumed_step in committed(tmp_path / "checkpoints")
    assert report.steps_repeated >= HOLD_AT - report.resumed_step
    assert_exact(tmp_path / "job" / "out", undisturbed(SHARDED, STEPS, 2), ranks=2, steps=STEPS)


@pytest.mark.long
def test_a_crash_during_the_restart_after_a_crash(tmp_path: Path) -> None:
    """C144: twice in a row before the first step; the same snapshot is used both times."""
    wanted = request(*SHARDED, "--stop-at", str(HOLD_AT), steps=STEPS, settings=(OFTEN,))
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_held(job, HOLD_AT)
        step = wait_for(job, "snapshot_step", 5)
        first = job.kill_worker(1)
        let_go(job, HOLD_AT)
        again = job.wait_for(
            lambda: name if (name := second_life(job, first)) else None, "its next life"
        )
        assert again != first
        job.wait_for_incidents(1)
        result = end(job)
    assert all(report.resumed_step >= step for report in result.incidents)
    assert_exact(tmp_path / "job" / "out", undisturbed(SHARDED, STEPS, 2), ranks=2, steps=STEPS)


def second_life(job: RunningJob, first: str) -> str:
    """Kill whoever is to play rank 1 in the place of `first`, as soon as it is there."""
    found = read_struct(job.directory.machine_file("m1"), MachineFile)
    for name, pid in () if found is None else found.workers:
        if name != first:
            victims.kill_worker_process(pid)
            return name
    return ""
