"""Files beside the journal that people read: losses, findings, incidents, console lines.

Written by the controller's daemon, outside the decider: nothing here influences a decision, and a
full disk here never stops training (it is said once, in the log). One JSON object per line.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from trainmover.daemons.repeated_losses import LossFile, Repeats
from trainmover.protocol.journal import CheckpointMissed, IncidentReport
from trainmover.protocol.messages import (
    CadenceChosen,
    Coverage,
    Finding,
    RestoreChecked,
    StepLogged,
)

log = logging.getLogger(__name__)

KEPT_LINES: Final = 500
"""Console lines, findings, missed checkpoints: enough for who joins late; all stand in files."""
KEPT_LOSSES: Final = 2000
KEPT_REPORTS: Final = 100
"""Of each kind in memory, as in the decider: a job may run for months."""

T = TypeVar("T", bound=msgspec.Struct)


class LossRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What ``step.log`` recorded for one committed step."""

    step: int
    lineage: int
    """Generation in which the step's gate passed."""
    values: dict[str, str]
    """Floats as ``float.hex()``."""
    at_s: float = 0.0
    """Wall clock, for people."""


class ConsoleLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line that a person following the job should see."""

    sequence: int
    kind: str
    """finding, incident, decision, checkpoint, failure, end."""
    text: str


class Lines:
    """An append-only file of JSON lines; a write that fails is logged once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._has_failed = False

    def append(self, value: msgspec.Struct) -> None:
        """Add one line."""
        try:
            with open(self._path, "ab") as file:
                file.write(msgspec.json.encode(value) + b"\n")
        except OSError as error:
            if not self._has_failed:
                log.error("%s can't be written: %s; the job goes on", self._path, error)
            self._has_failed = True


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Values of a file of JSON lines; a last line cut short by a crash is left out."""
    decoder = msgspec.json.Decoder(kind)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    for line in text.split(b"\n"):
        if not line:
            continue
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            log.warning("%s: a line can't be read: %.80r", path, line)


class RecentLines(Generic[T]):
    """What is told one by one: all in a file, the last in memory (the disk may take no more)."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self._path, self._kind = path, kind
        self._file = Lines(path)
        self.last: deque[T] = deque(read_lines(path, kind), maxlen=KEPT_REPORTS)

    def add(self, value: T) -> None:
        """Keep one more."""
        self.last.append(value)
        self._file.append(value)

    def all(self) -> list[T]:
        """Oldest first; reads the file where there are more than the last ones."""
        if len(self.last) < KEPT_REPORTS:
            return list(self.last)
        lines = read_lines(self._path, self._kind)
        return [*(value for value in lines if value not in self.last), *self.last]


def read_losses(path: Path) -> dict[int, LossRecord]:
    """The record of each step, once; of a value told twice, the last lineage's (protocol.md, A 22).

    A step may be told in portions: by its parts, and reduced values one step later.
    """
    found: dict[int, LossRecord] = {}
    for record in read_lines(path, LossRecord):
        before = found.get(record.step)
        if before is None:
            found[record.step] = record
        elif record.lineage >= before.lineage:
            found[record.step] = msgspec.structs.replace(
                record, values={**before.values, **record.values}
            )
    return dict(sorted(found.items()))


class JobRecords:
    """What the daemon remembers for people: last values, findings, console lines."""

    def __init__(
        self, directory: Path, repeats: Repeats | None = None, loss_file: LossFile | None = None
    ) -> None:
        self._repeats = repeats
        self._loss_file = loss_file
        self.checks = RecentLines(directory / "checks.jsonl", RestoreChecked)
        """What checks behind restores have compared."""
        self.has_mismatch = False
        """Whether a check of this life has found a difference."""
        self._losses_path = directory / "losses.jsonl"
        self._losses = Lines(self._losses_path)
        self._console_file = Lines(directory / "console.jsonl")
        self._console: deque[ConsoleLine] = deque(maxlen=KEPT_LINES)
        self._findings: dict[tuple[str, str], Finding] = {}
        self.incidents = RecentLines(directory / "incidents.jsonl", IncidentReport)
        """Finished reports."""
        self.coverage = RecentLines(directory / "coverage.jsonl", Coverage)
        """What joiners' rehearsals had not seen."""
        self._missed_file = Lines(directory / "missed.jsonl")
        self.missed = list(read_lines(directory / "missed.jsonl", CheckpointMissed))
        """Checkpoints that could not be made, oldest first."""
        self.cadence: CadenceChosen | None = None
        """How often state is saved, as rank 0 has told last."""
        self.last: LossRecord | None = None
        self._known: dict[int, LossRecord] = {}
        for line in read_lines(directory / "console.jsonl", ConsoleLine):
            self._console.append(line)
        for record in read_losses(self._losses_path).values():
            self._remember(record)

    def add_step(self, logged: StepLogged) -> None:
        """Keep what a step logged; what is known already adds nothing.

        Agents repeat their last messages to a new controller: the old one may have been killed
        between hearing them and writing them down.
        """
        before = self._known.get(logged.step)
        told = dict(logged.values)
        values = told
        if before is not None and logged.lineage < before.lineage:
            return
        if before is not None and logged.lineage == before.lineage:
            if logged.is_again:
                told = {name: told[name] for name in told if name not in before.values}
            values = {**before.values, **told}
            if values == before.values:
                return
        record = LossRecord(
            step=logged.step, lineage=logged.lineage, values=values, at_s=time.time()
        )
        if self._repeats is not None:
            for check in self._repeats.seen(logged.step, logged.lineage, told, before):
                self.add_check(check)
        self._remember(record)
        self._losses.append(record)
        if self._loss_file is not None:
            self._loss_file.add(logged.step, logged.lineage, told)

    def _remember(self, record: LossRecord) -> None:
        self._known[record.step] = record
        if self.last is None or record.step >= self.last.step:
            self.last = record
        while len(self._known) > KEPT_LOSSES:
            del self._known[min(self._known)]

    def add_finding(self, finding: Finding) -> None:
        """Keep a finding; the same text of another rank is the same finding."""
        key = (finding.kind, finding.text)
        if key in self._findings:
            return
        self._findings[key] = finding
        while len(self._findings) > KEPT_LINES:
            del self._findings[next(iter(self._findings))]
        text = f"{finding.kind} (rank {finding.rank}): {finding.text}"
        if not self.has_said(text):
            self.say("finding", text)

    def add_incident(self, report: IncidentReport) -> None:
        """Keep a finished report."""
        if any(known.number == report.number for known in self.incidents.last):
            return
        self.incidents.add(report)
        self.say("incident", describe(report))

    def add_coverage(self, coverage: Coverage) -> None:
        """Keep what a joiner's rehearsal had not seen; agents may say it twice."""
        if coverage not in self.coverage.last:
            self.coverage.add(coverage)

    def add_missed(self, missed: CheckpointMissed) -> None:
        """Keep a checkpoint that could not be made."""
        self.missed.append(missed)
        del self.missed[:-KEPT_LINES]
        self._missed_file.append(missed)
        self.say("checkpoint", describe_missed(missed))

    def add_check(self, check: RestoreChecked) -> None:
        """Keep what was compared behind a restore; agents may say it twice."""
        if check in self.checks.last:
            return
        self.checks.add(check)
        self.has_mismatch = self.has_mismatch or bool(check.differing)
        self.say("mismatch" if check.differing else "check", check.text)

    def close(self, timeout_s: float) -> None:
        """The job has ended: say what is left to say, give what writes behind it so long."""
        if self._repeats is not None and self.last is not None:
            for check in self._repeats.finish(self.last.lineage):
                self.add_check(check)
        if self._loss_file is not None:
            self._loss_file.close(timeout_s)

    def say(self, kind: str, text: str) -> None:
        """Add a console line."""
        number = self._console[-1].sequence + 1 if self._console else 1
        line = ConsoleLine(sequence=number, kind=kind, text=text)
        self._console.append(line)
        self._console_file.append(line)

    def has_said(self, text: str) -> bool:
        """Whether the line is among the kept ones."""
        return any(line.text == text for line in self._console)

    def lines_after(self, sequence: int) -> list[ConsoleLine]:
        """Console lines younger than `sequence`."""
        return [line for line in self._console if line.sequence > sequence]

    @property
    def findings(self) -> list[Finding]:
        """All findings, first seen first."""
        return list(self._findings.values())

    def losses_after(self, step: int) -> list[LossRecord]:
        """Records of steps above `step`, each step once."""
        records = read_losses(self._losses_path)
        return [record for number, record in records.items() if number > step]


def describe(report: IncidentReport) -> str:
    """One line for a finished incident."""
    who = ", ".join(f"rank {culprit.rank} on {culprit.machine}" for culprit in report.culprits)
    total = max((phase.after_ns for phase in report.phases), default=0) / 1e9
    text = f"{report.kind} to generation {report.number}"
    text += f" ({who})" if who else ""
    return f"{text}: {report.reason}; first new step after {total:.2f} s. {report.outcome}".strip()


def describe_missed(missed: CheckpointMissed) -> str:
    """One line for a checkpoint that does not exist."""
    where = " on machines' disks" if missed.tier == "disk" else ""
    return (
        f"checkpoint {missed.number} of step {missed.version.step}{where} failed, training goes "
        f"on: {missed.reason}"
    )


def to_json(value: Any) -> bytes:
    """JSON of structs, lists and dicts."""
    return msgspec.json.encode(value)
