"""The job that most benchmarks hurt: it waits at a step until its standbys are as wanted.

Decides how such a job is started, let go and told about. So the number of steps is fixed, and with
it the undisturbed run, however long a standby compiles. Not here: what is done to the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainmover.drills.baseline import Event
from trainmover.drills.harness import RunningJob
from trainmover.drills.report import joiners
from trainmover.drills.report import summarise as summarise_incident
from trainmover.drills.request import FOLDER_WORD, JobRequest, JobResult
from trainmover.drills.runner import FINAL_ARGUMENTS
from trainmover.drills.step_times import stayers_downtime_s
from trainmover.errors import ConfigError, DrillFailed
from trainmover.protocol.journal import IncidentReport

EXAMPLES: Final = Path(__file__).resolve().parents[3] / "examples"
MODEL: Final = ("--layers", "4", "--width", "128", "--sequence", "64", "--batch", "1")
HOLD_VARIABLE: Final = "BENCH_HOLD"
GO: Final = "go"
SCRIPT: Final = EXAMPLES / "benchmarks" / "recovery_job.py"
WAIT_S: Final = 1200.0
STANDBY_FAILED: Final = "a standby failed and is not counted"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """What is trained, by how many."""

    machines: int
    steps: int
    model: tuple[str, ...]
    standbys: int = 1
    settings: tuple[tuple[str, str], ...] = ()
    caches: Path | None = None
    """Folder of compile caches, one per machine; None: eager."""
    limit_s: float = 900.0


def request_of(shape: JobShape) -> JobRequest:
    """How the job is started. Raises ConfigError outside a clone."""
    if not SCRIPT.is_file():
        raise ConfigError(f"no {SCRIPT}: run this benchmark in a clone")
    arguments = ("--steps", str(shape.steps), *shape.model, "--folder", FOLDER_WORD)
    if shape.caches is not None:
        arguments = (*arguments, "--compile", "--cache", str(shape.caches))
    return JobRequest(
        script=SCRIPT,
        arguments=(*arguments, *FINAL_ARGUMENTS),
        machines=shape.machines,
        standbys=shape.standbys,
        settings=shape.settings,
        limit_s=shape.limit_s,
    )


def held(step: int, folder: Path, *later: int) -> tuple[str, str]:
    """Environment for `disturbance`: the job in `folder` waits in front of `step`, and `later`."""
    waits = (f"{at}:{folder / GO}-{number}" for number, at in enumerate((step, *later)))
    return (HOLD_VARIABLE, ",".join(waits))


def let_go(job: RunningJob, number: int = 0) -> None:
    """End the first wait, or that of a later step."""
    (job.folder / f"{GO}-{number}").touch()


def wait_until_started(job: RunningJob, count: int) -> None:
    """Until `count` standbys are processes that listen, whatever they have built."""

    def enough() -> bool:
        standbys = (job.status() or {}).get("standbys", ())
        started = [each for each in standbys if each["reason"] != "starts"]
        return len(started) >= count

    job.wait_for(enough, f"{count} standbys started", WAIT_S)


def wait_until_ready(job: RunningJob, count: int) -> None:
    """Until `count` standbys can take over. Raises DrillFailed at once where one fails instead."""

    def enough() -> bool:
        lines = job.output_path.read_text(errors="replace").splitlines()
        failed = next((line for line in lines if STANDBY_FAILED in line), "")
        if failed:
            raise DrillFailed(failed)
        return len(job.ready_standbys()) >= count

    job.wait_for(enough, f"{count} standbys ready", WAIT_S)


def end(job: RunningJob, name: str) -> JobResult:
    """Until the job has completed. Raises DrillFailed."""
    result = job.wait_until_done()
    job.assert_no_leftovers()
    if result.code != 0:
        raise DrillFailed(f"{name}: the job ended with {result.code}: {result.output[-400:]}")
    return result


def incident_sample(
    incident: IncidentReport, events: Sequence[Event], job: RunningJob
) -> dict[str, Any]:
    """One incident as samples keep it."""
    joined = {role.rank for role in joiners(incident)}
    traffic = {marks.rank: marks.traffic for marks in incident.marks if marks.traffic is not None}
    return {
        "kind": incident.kind,
        "downtime_s": stayers_downtime_s(incident, events),
        "resumed_step": incident.resumed_step,
        "phases": {phase.name: phase.after_ns / 1e9 for phase in incident.phases},
        "summary": asdict(summarise_incident(incident, job.losses())),
        "roles": [
            {
                "rank": role.rank,
                "machine": role.machine,
                "is_joiner": role.rank in joined,
                "adopted": role.adopted,
                "bytes_received": role.bytes_received,
                "opened": role.channels.opened,
                "inherited": role.channels.inherited,
                "closed": role.channels.closed,
                "traffic": _plain(traffic.get(role.rank)),
            }
            for role in incident.roles
        ],
        "marks": {
            str(marks.rank): {mark.name: mark.at_ns / 1e9 for mark in marks.marks}
            for marks in incident.marks
        },
    }


def _plain(traffic: Any) -> dict[str, int] | None:
    if traffic is None:
        return None
    return {name: getattr(traffic, name) for name in traffic.__struct_fields__}
