"""C105: compiled code is not made again by a standby, nor by a worker started anew in place.

How long each takes is printed, not judged: a busy machine says nothing about time. What is judged
is what time depends on: graphs that are compiled, and incidents while the job compiles.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainmover.drills import held_job
from trainmover.drills.bench_scale import TINY
from trainmover.drills.compare import compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.protocol.journal import IncidentReport

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

HOLD_AT = 12
LATER = (17, 25)
"""In front of these it waits for its losses."""


def seconds_of(incident: IncidentReport) -> float:
    """From the first sign to the first gate behind it."""
    (after_ns,) = [each.after_ns for each in incident.phases if each.name == "first_gate"]
    return after_ns / 1e9


def entries(job: RunningJob, incarnation: str) -> list[int]:
    """Graphs compiled in each entry of `main` of a standby."""
    paths = [p for p in job.directory.logs.rglob(f"*{incarnation}*") if p.is_file()]
    text = "".join(path.read_text(errors="replace") for path in paths)
    return [int(count) for count in re.findall(r"(\d+) graphs compiled", text)]


def test_cold_start_against_restart_in_place_and_standby(tmp_path: Path) -> None:
    shape = held_job.JobShape(
        machines=2, steps=60, model=TINY, caches=tmp_path / "caches", limit_s=800.0
    )
    plain = held_job.request_of(shape)
    folder = tmp_path / "job"
    started_s = time.time()
    held = held_job.held(HOLD_AT, folder, *LATER)
    with RunningJob(replace(plain, disturbance=(held,)), folder) as job:
        job.wait_for_step(0, 600.0)
        cold_s = job.losses()[0].at_s - started_s
        held_job.wait_until_ready(job, 1)
        standby = next(s for s in (job.status() or {})["standbys"] if s["is_ready"])
        assert job.incidents() == [], "nothing is taken for a hang while it compiles"
        held_job.let_go(job)
        job.wait_for_step(LATER[0] - 1)
        job.kill_worker(0)
        held_job.let_go(job, 1)
        job.wait_for_incidents(1, 300.0)
        job.wait_for_step(LATER[1] - 1)
        job.kill_machine("m1")
        held_job.let_go(job, 2)
        job.wait_for_incidents(2, 300.0)
        graphs = entries(job, standby["incarnation"])
        result = held_job.end(job, "compiled")
    respawn, promoted = result.incidents
    print(
        f"cold start {cold_s:.2f} s, restart in place {seconds_of(respawn):.2f} s, "
        f"standby {seconds_of(promoted):.2f} s ({promoted.roles[1].adopted})"
    )
    assert [respawn.kind, promoted.kind] == ["respawn", "standby"]
    assert promoted.roles[1].incarnation == standby["incarnation"]
    assert promoted.roles[1].adopted == "in_place", standby["reason"]
    assert graphs[0] > 0
    assert len(graphs) == 1, "main was entered again"
    comparison = compare(result, run_undisturbed(plain, tmp_path / "undisturbed"))
    assert comparison.is_identical, comparison.sentence()
