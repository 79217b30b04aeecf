"""Two tiers of the toy's checkpoints: what lies where, how it is damaged, who serves a start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cases.runs import request
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.survey import Committed, survey
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest


@dataclass(frozen=True)
class Tiers:
    """Places of one job under one folder."""

    folder: Path

    @property
    def shared(self) -> Path:
        """What every machine reaches."""
        return self.folder / "shared"

    @property
    def local(self) -> Path:
        """Machines' own disks, one directory each."""
        return self.folder / "local"

    def disk(self, machine: str) -> Path:
        """One machine's own."""
        return self.local / machine

    def life(self, every: int, *arguments: str, steps: int, **fields: object) -> JobRequest:
        """One life of the job; all lives share a trace and both tiers."""
        made = request(
            "--pace",
            "0.1",
            *arguments,
            steps=steps,
            flags=("--checkpoints", str(self.shared), "--local-checkpoints", str(self.local)),
            settings=(
                ("checkpoint.cadence", f"every {every} steps"),
                ("snapshot.cadence", "never"),
                ("checkpoint.parallel_machines_share", "1.0"),
                *fields.pop("settings", ()),  # type: ignore[misc]
            ),
            **fields,  # type: ignore[arg-type]
        )
        words = ("--out", str(self.folder / "out"), *made.arguments[2:])
        return JobRequest(**{**_fields(made), "arguments": words})


def _fields(made: JobRequest) -> dict[str, object]:
    return {name: getattr(made, name) for name in JobRequest.__slots__}


def committed(place: Path) -> list[Committed]:
    """What counts in one place, oldest first."""
    return list(survey(open_store(str(place))).committed)


def steps(place: Path) -> list[int]:
    """Their steps."""
    return [each.manifest.step for each in committed(place)]


def flip(place: Path, step: int, pattern: str) -> Path:
    """Turn a bit in the matching file of the checkpoint of `step`."""
    (path,) = place.glob(f"step-{step:010d}-*/{pattern}")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return path


def wait_for_disks(job: RunningJob, step: int) -> int:
    """Until a checkpoint of `step` or later is on all machines' disks; its step."""

    def newest() -> int | None:
        found = int((job.status() or {}).get("disk_step", -1))
        return found if found >= step else None

    return job.wait_for(newest, f"a checkpoint of step {step} on machines' disks", 60.0)


def wait_for_storage(job: RunningJob, step: int) -> int:
    """Until a checkpoint of `step` or later is on the storage of all; its step."""

    def newest() -> int | None:
        found = int((job.status() or {}).get("checkpoint_step", -1))
        return found if found >= step else None

    return job.wait_for(newest, f"a checkpoint of step {step} on the storage", 60.0)


def line_of(output: str, words: str) -> str:
    """The console line with `words`."""
    return next(line for line in output.splitlines() if words in line)
