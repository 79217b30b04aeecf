"""`trainmover check`: finds, before the run, what would break exact recovery later.

Runs the script's first steps twice on this host: once on 2 machines and a standby, where step 2 is
undone and repeated although nothing fails and one machine is switched over; once undisturbed. The
losses and the state of every step must be equal.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainmover.cli.run import report_end, resolve_settings
from trainmover.daemons import settings as settings_of
from trainmover.daemons.records import LossRecord, read_lines
from trainmover.daemons.run_directory import (
    ControllerFile,
    FailureFile,
    RunDirectory,
    read_struct,
)
from trainmover.daemons.supervisor import JobPlan, Supervisor
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol import exits
from trainmover.protocol.messages import SwitchoverRequest

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
FOUND_SOMETHING: Final = 1
MACHINE: Final = "m1"
POLL_S: Final = 0.2
NOTICES: Final = ("notice", "transfer", "stopped", "torch")
LINE: Final = re.compile(r"(?P<kind>[\w-]+) \(rank -?\d+\): (?P<text>.*)", re.DOTALL)
PLACE: Final = re.compile(r"[\w.-]+\.py:\d+")
FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
OURS: Final = ("/trainmover/", "/torch/", "runpy")


@dataclass(frozen=True)
class Found:
    """One line of the result."""

    kind: str
    text: str
    place: str = ""
    """file:line; empty where it is not about one place."""
    is_note: bool = False
    """Worth knowing, but nothing that breaks exact recovery."""

    def line(self, script: str) -> str:
        """`train.py:41: [untracked] what was found, and the remedy`."""
        label = "note: " if self.is_note else ""
        return f"{self.place or script}: {label}[{self.kind}] {self.text}"


def found_from(text: str) -> Found | None:
    """A finding as the job tells it; None for a mere notice."""
    match = LINE.fullmatch(text)
    if match is None or match["kind"] in NOTICES:
        return None
    told = " ".join(match["text"].split())
    place = PLACE.search(told)
    where = place.group() if place is not None else ""
    return Found(match["kind"], told.removeprefix(f"{where}: "), where)


def place_of(traceback: str) -> str:
    """file:line of the innermost frame of the script."""
    frames = [
        f"{Path(file).name}:{line}"
        for file, line in FRAME.findall(traceback)
        if not any(part in file for part in OURS) and not file.startswith("<")
    ]
    return frames[-1] if frames else ""


class QuietScreen:
    """Keeps what the job says; shows where it is."""

    def __init__(self, what: str) -> None:
        self.findings: list[Found] = []
        self._what = what
        self._shown = ""

    def line(self, kind: str, text: str) -> None:
        """A finding is kept; the rest of a short job is of no interest."""
        found = found_from(text) if kind == "finding" else None
        if found is not None and found not in self.findings:
            self.findings.append(found)

    def progress(self, status: dict[str, Any], last: dict[str, Any] | None) -> None:
        """One line per change of phase."""
        del last
        phase = str(status.get("word", ""))
        if phase != self._shown:
            self._shown = phase
            typer.echo(f"{self._what}: {phase}", err=True)

    def close(self) -> None:
        """Nothing is open."""


class Mover(threading.Thread):
    """Asks for one switchover as soon as the standby is ready."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(name="trainmover-check", daemon=True)
        self._directory = directory
        self.reply = ""
        self.standby_note = ""
        self.stop = threading.Event()

    def run(self) -> None:
        """Until asked, or until the job has ended."""
        while not self.stop.wait(POLL_S):
            try:
                if self._try():
                    return
            except (TrainMoverError, OSError):
                # The controller is not up yet, or the job is over; `stop` ends the loop.
                continue

    def _try(self) -> bool:
        file = read_struct(self._directory.path / "controller.json", ControllerFile)
        if file is None:
            return False
        token = self._directory.token.read_text(encoding="ascii").strip()
        client = OperatorClient(file.host, file.port, token)
        try:
            status = client.get("status")["status"]
            ready = [standby for standby in status["standbys"] if standby["is_ready"]]
            if not ready or status["step"] < 4:
                return False
            self.standby_note = str(ready[0]["reason"])
            request = SwitchoverRequest(request=uuid.uuid4().hex[:12], machines=(MACHINE,))
            self.reply = client.request(request).text
            return True
        finally:
            client.close()


def check(
    script: Annotated[Path, typer.Argument(help="training script; its arguments follow")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script")] = None,
    keep: Annotated[bool, typer.Option(help="keep the two runs' files")] = False,
) -> int:
    """Run SCRIPT's first steps on 2 machines and a standby; 0: it can be interrupted anywhere."""
    if not script.is_file():
        raise ConfigError(f"no script at {script}")
    base = Path(tempfile.mkdtemp(prefix="trainmover-check-"))
    started = time.monotonic()
    try:
        findings = _check(script, tuple(arguments or ()), base)
    finally:
        if not keep:
            shutil.rmtree(base, ignore_errors=True)
    for finding in sorted(findings, key=lambda found: found.is_note):
        typer.echo(finding.line(script.name))
    seconds = time.monotonic() - started
    count = sum(not finding.is_note for finding in findings)
    if count:
        noun = "finding" if count == 1 else "findings"
        typer.echo(f"{count} {noun} in {seconds:.0f} s: {script} can't be relied on yet")
        return FOUND_SOMETHING
    typer.echo(f"nothing found in {seconds:.0f} s: {script} can be interrupted at any step")
    return exits.COMPLETED


def _check(script: Path, arguments: tuple[str, ...], base: Path) -> list[Found]:
    disturbed = QuietScreen("with an undo and a switchover")
    directory = RunDirectory(base / "disturbed")
    mover = Mover(directory)
    mover.start()
    code, steps = _run(script, arguments, directory, disturbed, {"worker.is_check": "true"})
    mover.stop.set()
    mover.join(timeout=10.0)
    if code != exits.COMPLETED:
        return [*disturbed.findings, _ended(directory, code)]
    if mover.standby_note:
        disturbed.findings.append(_rank_note(mover.standby_note))
    if not any(set(values) - {"state"} for values in steps.values()):
        text = "no step.log() in the script: losses can't be compared. step.log(loss=loss)"
        return [*disturbed.findings, Found("log", text)]
    quiet = QuietScreen("undisturbed")
    settings = {"worker.max_steps": str(max(steps) + 1)}
    code, expected = _run(script, arguments, RunDirectory(base / "undisturbed"), quiet, settings)
    if code != exits.COMPLETED:
        return [*disturbed.findings, _ended(RunDirectory(base / "undisturbed"), code)]
    findings = disturbed.findings + _differences(expected, steps)
    if not mover.reply:
        text = "the standby was not ready before the last step; nothing moved. Give it more steps"
        findings.append(Found("steps", text))
    return findings


def _rank_note(place: str) -> Found:
    where = place if PLACE.fullmatch(place) else ""
    text = (
        "the rank is read while main builds: another rank is adopted by entering main again, which "
        "takes as long as building. job.seed() and DistributedSampler are known and cost nothing"
    )
    return Found("rank", text if where else f"{place}: {text}", where, is_note=True)


def _ended(directory: RunDirectory, code: int) -> Found:
    """The job did not get through: the script's own error is the finding."""
    failure = read_struct(directory.path / "failure.json", FailureFile)
    if code == exits.SCRIPT_FAILED and failure is not None:
        return Found("script", " ".join(failure.error.split()), place_of(failure.text))
    return Found("end", f"the job ended with code {code}: {exits.REASONS.get(code, '?')}")


def _run(
    script: Path,
    arguments: tuple[str, ...],
    directory: RunDirectory,
    screen: QuietScreen,
    extra: dict[str, str],
) -> tuple[int, dict[int, dict[str, str]]]:
    assignments = [f"{name}={value}" for name, value in extra.items()]
    assignments.append("worker.does_log_digests=true")
    settings = resolve_settings(None, assignments, 3, 2)
    supervisor = Supervisor(
        JobPlan(
            script=str(script),
            arguments=arguments,
            machines=2,
            standbys=1 if "worker.is_check" in extra else 0,
            job=directory.path.name,
            run_directory=directory.path,
            settings=settings_of.flatten(settings),
        ),
        screen,
    )
    code = supervisor.run()
    if code not in (exits.COMPLETED, exits.SCRIPT_FAILED):
        report_end(supervisor, code, has_shown_logs=False)
    records = read_lines(directory.path / "losses.jsonl", LossRecord)
    return code, {record.step: record.values for record in records}


def _differences(
    expected: dict[int, dict[str, str]], seen: dict[int, dict[str, str]]
) -> list[Found]:
    found = []
    for step in sorted(expected):
        names = sorted(
            name
            for name in set(expected[step]) | set(seen.get(step, {}))
            if expected[step].get(name) != seen.get(step, {}).get(name)
        )
        if names:
            text = f"step {step} differs from the undisturbed run in {', '.join(names)}"
            found.append(Found("numbers", text))
    return found[:1]
