"""`trainmover check`: finds, before the run, what would break exact recovery later.

Runs the script's first steps twice on this host: once on 2 machines and a standby, where step 2 is
undone and repeated although nothing fails and one machine is switched over; once undisturbed. The
losses and the state of every step must be equal.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trainmover.cli.run import report_end, resolve_settings
from trainmover.daemons import settings as settings_of
from trainmover.daemons.records import LossRecord, read_lines
from trainmover.daemons.run_directory import ControllerFile, RunDirectory, read_struct
from trainmover.daemons.supervisor import JobPlan, Supervisor
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol import exits
from trainmover.protocol.messages import SwitchoverRequest

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
FOUND_SOMETHING: Final = 1
MACHINE: Final = "m1"
POLL_S: Final = 0.2
NOTICES: Final = ("notice (", "transfer (", "stopped (")


class QuietScreen:
    """Keeps what the job says; shows where it is."""

    def __init__(self, what: str) -> None:
        self.findings: list[str] = []
        self._what = what
        self._shown = ""

    def line(self, kind: str, text: str) -> None:
        """A finding is kept; the rest of a short job is of no interest."""
        if kind == "finding" and text not in self.findings and not text.startswith(NOTICES):
            self.findings.append(text)

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
    for finding in findings:
        typer.echo(f"found: {finding}")
    seconds = time.monotonic() - started
    if findings:
        typer.echo(f"{len(findings)} findings in {seconds:.0f} s: {script} can't be relied on yet")
        return FOUND_SOMETHING
    typer.echo(f"nothing found in {seconds:.0f} s: {script} can be interrupted at any step")
    return exits.COMPLETED


def _check(script: Path, arguments: tuple[str, ...], base: Path) -> list[str]:
    disturbed, mover = QuietScreen("with an undo and a switchover"), None
    directory = RunDirectory(base / "disturbed")
    mover = Mover(directory)
    mover.start()
    code, steps = _run(script, arguments, directory, disturbed, {"worker.is_check": "true"})
    mover.stop.set()
    mover.join(timeout=10.0)
    if code != exits.COMPLETED:
        return [*disturbed.findings, f"the job ended with code {code} (see above)"]
    if mover.standby_note:
        disturbed.findings.append(
            f"rank (info): {mover.standby_note} reads the rank while main builds; another rank is "
            "adopted by entering main again, which takes as long as building. job.seed() and "
            "DistributedSampler are known and cost nothing"
        )
    if not steps:
        return [*disturbed.findings, "no step.log() in the script: losses can't be compared"]
    quiet = QuietScreen("undisturbed")
    settings = {"worker.max_steps": str(max(steps) + 1)}
    code, expected = _run(script, arguments, RunDirectory(base / "undisturbed"), quiet, settings)
    if code != exits.COMPLETED:
        return [*disturbed.findings, f"the undisturbed job ended with code {code} (see above)"]
    findings = disturbed.findings + _differences(expected, steps)
    if not mover.reply:
        findings.append("the standby was not ready before the script's last step; nothing moved")
    return [finding for finding in findings if "(info)" not in finding] or _informed(findings)


def _informed(findings: list[str]) -> list[str]:
    for finding in findings:
        typer.echo(f"note: {finding}")
    return []


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
    if code != exits.COMPLETED:
        report_end(supervisor, code, has_shown_logs=False)
    records = read_lines(directory.path / "losses.jsonl", LossRecord)
    return code, {record.step: record.values for record in records}


def _differences(expected: dict[int, dict[str, str]], seen: dict[int, dict[str, str]]) -> list[str]:
    found = []
    for step in sorted(expected):
        names = sorted(
            name
            for name in set(expected[step]) | set(seen.get(step, {}))
            if expected[step].get(name) != seen.get(step, {}).get(name)
        )
        if names:
            found.append(
                f"numbers: step {step} differs from the undisturbed run in {', '.join(names)}"
            )
    return found[:3]
