"""Lives of one job: each is killed at one stroke behind a checkpoint, the next resumes from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.cases.runs import committed, end, kill_all, request
from trainmover.daemons.records import read_lines
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.protocol.messages import RestoreChecked

PACE = ("--pace", "0.1")
SLACK = 60
"""Steps a life needs behind a checkpoint until that is durable, on a busy machine."""


def life(
    folder: Path,
    every: int,
    *arguments: str,
    steps: int,
    machines: int = 2,
    place: int = -1,
    settings: tuple[tuple[str, str], ...] = (),
) -> JobRequest:
    """One life of the toy; all lives share a trace and the checkpoints.

    One that is to be killed, behind the checkpoint of `place` (by default its first), waits in
    front of the next one: however slow the machine is, that checkpoint comes to count.
    """
    place = every if place < 0 else place
    held = ("--stop-at", str(min(max(place, place + every - 2), steps - 2)))
    made = request(
        *arguments,
        *((*PACE, *held) if every < steps else ()),
        steps=steps,
        machines=machines,
        flags=("--checkpoints", str(folder / "checkpoints")),
        settings=(
            ("checkpoint.cadence", f"every {every} steps"),
            ("snapshot.cadence", "never"),
            *settings,
        ),
    )
    return replace(made, arguments=("--out", str(folder / "out"), *made.arguments[2:]))


def kill_behind(wanted: JobRequest, folder: Path, root: Path, step: int, further: int = 0) -> None:
    """Run the job until checkpoint `step` counts and `further` more steps; then kill all."""
    with RunningJob(wanted, folder) as job:
        checkpoints = root / "checkpoints"
        job.wait_for(lambda: step in committed(checkpoints) or None, f"checkpoint {step}", 90.0)
        if further:
            job.wait_for_step(step + further)
        kill_all(job)


def run_on(wanted: JobRequest, folder: Path) -> tuple[JobResult, list[RestoreChecked]]:
    """The last life, to its end; what checks behind its restore have said."""
    with RunningJob(wanted, folder) as job:
        result = end(job)
        return result, checks_of(job)


def checks_of(job: RunningJob) -> list[RestoreChecked]:
    """What checks behind restores have said so far."""
    return list(read_lines(job.losses_path.with_name("checks.jsonl"), RestoreChecked))


def chain(folder: Path, places: list[int], *arguments: str, steps: int, machines: int = 2) -> None:
    """Killed behind a checkpoint at each of `places`, in turn; then run to the end."""
    for number, place in enumerate(places):
        wanted = life(folder, place, *arguments, steps=steps, machines=machines)
        kill_behind(wanted, folder / f"life{number}", folder, place)
    run_on(life(folder, steps, *arguments, steps=steps, machines=machines), folder / "last")
