"""Every machine and every pair of machines is lost, each at steps drawn from a printed seed.

A machine that was killed is brought back each time and waits as standby for the next loss. The
machines are fault domains of their own, so the copies of a rank's state survive any pair.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests import tiny
from tests.drill.parallel import kinds
from tests.drill.parallel.kinds import Parallel

from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.repair import Repairs
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.protocol.journal import IncidentReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def named(kind: Parallel) -> str:
    return kind.name


ROUNDS = int(os.environ.get("TRAINMOVER_LOSS_ROUNDS", "6"))
"""How often each machine and each pair is lost in the long form."""
VICTIMS = 4
GAP_STEPS = 12
"""A loss strikes at most this many steps behind the moment when all standbys are ready."""
SNAPSHOT_STEPS = 10
FIRST_STEP = 4
PAUSE_S = 0.5
STEPS_PER_LOSS = 50
"""Twice what passes until the machines are back on two cores; the rest goes by at full speed."""
SHORT_STEPS = 60
ENOUGH = "enough"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Ranks whose machines die at once, and how many steps the job is given before."""

    ranks: tuple[int, ...]
    after_steps: int


def every_loss(draw: random.Random, rounds: int) -> list[Loss]:
    """Each of four machines and each pair of them, `rounds` times, in a drawn order."""
    singles = [(rank,) for rank in range(VICTIMS)]
    sets = [*singles, *itertools.combinations(range(VICTIMS), 2)] * rounds
    draw.shuffle(sets)
    return [Loss(ranks=ranks, after_steps=draw.randint(1, GAP_STEPS)) for ranks in sets]


def told(incidents: Iterable[IncidentReport]) -> list[str]:
    """Machines that were lost, as reports name them."""
    return sorted(name for report in incidents for name in {c.machine for c in report.culprits})


def wait_until_told(job: RunningJob, lost: list[str]) -> None:
    job.wait_for(lambda: told(job.incidents()) == lost, f"{lost} are told as lost", 90.0)


def carry_out(wanted: JobRequest, losses: list[Loss], folder: Path) -> JobResult:
    """One job through all of `losses`; then it is let go on to its end."""
    with RunningJob(wanted, folder) as job, Repairs(job) as repairs:
        job.wait_for_step(FIRST_STEP)
        lost: list[str] = []
        for loss in losses:
            job.wait_for_standby(2)
            job.wait_for_step(job.last_step() + loss.after_steps)
            machines = [job.member(rank).machine for rank in loss.ranks]
            lost = sorted([*lost, *machines])
            job.kill_machine(*machines)
            # One incident, or two where this process stood still between two kills.
            wait_until_told(job, lost)
            for machine in machines:
                repairs.bring_back(machine)
        (folder / ENOUGH).touch()
        result = job.wait_until_done()
        job.assert_no_leftovers()
    return result


def lose(kind: Parallel, losses: list[Loss], folder: Path, steps: int) -> None:
    """Same numbers, each loss told once; prints what each kind of loss cost."""
    wanted = replace(
        kind.request(steps=steps, standbys=2),
        settings=(("snapshot.cadence", f"every {SNAPSHOT_STEPS} steps"),),
        environment=(("PACED_PAUSE_S", "0"),),
        disturbance=(
            ("PACED_PAUSE_S", str(PAUSE_S)),
            ("PACED_UNTIL", str(folder / "disturbed" / ENOUGH)),
        ),
        limit_s=3500.0,
    )
    result = carry_out(wanted, losses, folder / "disturbed")
    assert result.code == 0, result.output
    assert len(told(result.incidents)) == sum(len(loss.ranks) for loss in losses)
    lost: dict[tuple[int, str], list[int]] = {}
    for incident in result.incidents:
        key = (len(told([incident])), incident.kind)
        lost.setdefault(key, []).append(incident.steps_repeated)
    for (machines, how), steps_lost in sorted(lost.items()):
        print(f"{kind.name}: {machines} lost, {how}: steps done again {sorted(steps_lost)}")
    comparison = compare(result, run_undisturbed(wanted, folder / "undisturbed"))
    assert comparison.is_identical, f"{kind.name}: {comparison.sentence()}"


@pytest.mark.long
@pytest.mark.parametrize("kind", [kinds.DDP, kinds.UNREPLICATED[0], kinds.THREE_D], ids=named)
def test_every_machine_and_every_pair_at_six_steps(kind: Parallel, tmp_path: Path) -> None:
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    losses = every_loss(random.Random(tiny.seed()), ROUNDS)
    lose(kind, losses, tmp_path, STEPS_PER_LOSS * len(losses))


def test_a_pair_without_replicas(tmp_path: Path) -> None:
    """The short form: one drawn pair of the longer list, under pure FSDP2 (a single machine:
    `tests/process/snapshots`)."""
    print(f"{tiny.SEED_VARIABLE}={tiny.seed()}")
    losses = every_loss(random.Random(tiny.seed()), 1)
    pair = next(loss for loss in losses if len(loss.ranks) == 2)
    lose(kinds.UNREPLICATED[0], [pair], tmp_path, SHORT_STEPS)
