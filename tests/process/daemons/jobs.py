"""Running jobs of toy workers for tests: start, look, ask, and wait for the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import eventually

from trainmover.daemons.records import LossRecord, read_losses
from trainmover.daemons.run_directory import (
    ControllerFile,
    MachineFile,
    OutcomeFile,
    RunDirectory,
    read_struct,
)
from trainmover.edges.operator_client import OperatorClient
from trainmover.edges.seal import read_token
from trainmover.errors import TrainMoverError

ROOT = Path(__file__).parents[3]


@dataclass
class Job:
    """One job as a process."""

    directory: RunDirectory
    process: subprocess.Popen[bytes]
    output: Path
    clients: list[OperatorClient] = field(default_factory=list)

    def controller(self) -> ControllerFile:
        found = read_struct(self.directory.path / "controller.json", ControllerFile)
        assert found is not None
        return found

    def machine(self, name: str) -> MachineFile:
        found = read_struct(self.directory.machine_file(name), MachineFile)
        assert found is not None
        return found

    def client(self) -> OperatorClient:
        at = self.controller()
        made = OperatorClient(at.host, at.port, read_token(self.directory.token), timeout_s=10.0)
        self.clients.append(made)
        return made

    def status(self) -> dict[str, Any]:
        """Status, or nothing while the controller is away."""
        if not (self.directory.path / "controller.json").exists():
            return {}
        try:
            found: dict[str, Any] = self.client().get("status")["status"]
        except TrainMoverError:
            return {}
        return found

    def losses(self) -> dict[int, LossRecord]:
        return read_losses(self.directory.path / "losses.jsonl")

    def wait_for_step(self, step: int) -> None:
        eventually(lambda: max(self.losses(), default=-1) >= step, f"step {step}", timeout_s=60)

    def wait_for_standby(self) -> None:
        eventually(
            lambda: any(s["is_ready"] for s in self.status().get("standbys", [])),
            "a standby is ready",
            timeout_s=60,
        )

    def outcome(self) -> OutcomeFile | None:
        return read_struct(self.directory.path / "outcome.json", OutcomeFile)

    def text(self) -> str:
        """What has been printed so far."""
        return self.output.read_text(errors="replace")

    def machine_of(self, rank: int = 0) -> str:
        """Machine that plays `rank`; empty while nobody can say."""
        ranks = self.status().get("ranks") or ()
        return next((each["machine"] for each in ranks if each["rank"] == rank), "")

    def end(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Exit code and all output; a job that has done its steps goes on until here."""
        enough_of(self.directory.path).touch()
        code = self.process.wait(timeout_s)
        return code, self.text()


def enough_of(path: Path) -> Path:
    """The file with which the job in `path` may end."""
    return path.with_name(f"{path.name}-enough")


@contextmanager
def job(path: Path, steps: int, **options: Any) -> Iterator[Job]:
    """A job of toy workers, of `steps` at least; killed behind the block if it still runs."""
    arguments = [str(steps), str(enough_of(path))]
    told = {"arguments": arguments, "machines": 1, **options}
    output = path.with_name(f"{path.name}-output.txt")
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.daemons.play", str(path), json.dumps(told)],
            cwd=ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
            start_new_session=True,
        )
    made = Job(directory=RunDirectory(path), process=process, output=output)
    try:
        yield made
    finally:
        for client in made.clients:
            client.close()
        if process.poll() is None:
            process.kill()
        process.wait()
