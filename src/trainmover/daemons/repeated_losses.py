"""Steps that are done again must log again what they logged before, bit for bit.

Decides which values are compared and when something is said: at the first difference of a stretch,
and once when the run is past what it had reached before. Losses of an earlier run come from a file
beside its checkpoints (`LossFile`), so a job that is started again is compared as well.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Final

import msgspec

from trainmover.checkpoint import hashing
from trainmover.protocol.messages import Differing, RestoreChecked

if TYPE_CHECKING:
    from trainmover.daemons.records import LossRecord

log = logging.getLogger(__name__)

LATE_STEPS: Final = 8
"""Reduced values of a step are told a step later; so long a repeated step stays open."""
KEPT: Final = 20_000
"""Losses that wait for a directory that is not there yet, and lines after which a file is cut."""
NAMED: Final = 8


class Repeats:
    """Compares what repeated steps log with what they logged before."""

    def __init__(self, compared: str) -> None:
        self._parts = tuple(part.strip() for part in compared.split(",") if part.strip())
        self._expected: dict[int, dict[str, str]] = {}
        self._source = "steps done again"
        self._steps: set[int] = set()
        self._count = 0
        self._differing: list[Differing] = []

    def expect(self, losses: Mapping[int, Mapping[str, str]], source: str) -> None:
        """An earlier run had done these steps."""
        self._expected.update({step: self._comparable(v) for step, v in losses.items()})
        self._source = source

    def seen(
        self, step: int, lineage: int, values: Mapping[str, str], before: LossRecord | None
    ) -> list[RestoreChecked]:
        """A step has logged `values`; what there is to say about it."""
        if before is not None and lineage > before.lineage:
            self._expected[step] = self._comparable(before.values)
        expected = self._expected.get(step)
        if expected is None:
            return self._ended(step, lineage)
        told: list[RestoreChecked] = []
        for name, value in self._comparable(values).items():
            recorded = expected.pop(name, None)
            if recorded is None:
                continue
            self._steps.add(step)
            self._count += 1
            if value != recorded:
                shown = f"{name} of step {step}"
                self._differing.append(Differing(name=shown, recorded=recorded, found=value))
                if len(self._differing) == 1:
                    told.append(self._mismatch(step, lineage))
        return told

    def _comparable(self, values: Mapping[str, str]) -> dict[str, str]:
        return {n: v for n, v in values.items() if any(part in n for part in self._parts)}

    def _mismatch(self, step: int, lineage: int) -> RestoreChecked:
        first = self._differing[0]
        text = (
            f"{first.name} is {first.found}, and was {first.recorded} before: the run does not "
            "repeat itself. Suspects, in this order: random generators, state that is not "
            "tracked, the order of shards; or script, arguments or data have been changed"
        )
        return self._told(step, lineage, text)

    def _ended(self, step: int, lineage: int) -> list[RestoreChecked]:
        """Nothing was expected of this step: is a stretch of repeated ones over?"""
        for late in [one for one in self._expected if one < step - LATE_STEPS]:
            del self._expected[late]
        if not self._steps or step <= max(self._steps):
            return []
        return self.finish(lineage)

    def finish(self, lineage: int) -> list[RestoreChecked]:
        """What there is to say about repeated steps that nothing more is expected of."""
        if not self._steps:
            return []
        first, last = min(self._steps), max(self._steps)
        where = f"steps {first} to {last}" if last > first else f"step {first}"
        how = "all equal to those before, bit for bit"
        if self._differing:
            how = f"{len(self._differing)} differ from those before"
        told = self._told(first, lineage, f"{where} done again: {self._count} values, {how}")
        self._steps, self._count, self._differing = set(), 0, []
        return [told]

    def _told(self, step: int, lineage: int, text: str) -> RestoreChecked:
        return RestoreChecked(
            incarnation="",
            rank=0,
            generation=lineage,
            step=step,
            source=self._source,
            compared=self._count,
            differing=tuple(self._differing[:NAMED]),
            text=text,
        )


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a run of a certain number of ranks."""

    step: int
    lineage: int
    ranks: int
    values: dict[str, str]


class LossFile:
    """Losses of one run, beside its checkpoints; written by a thread that nobody waits for.

    Only where checkpoints go to a directory, and only once that is there: storage that is slow,
    full or gone costs lines, never a step.
    """

    def __init__(self, directory: str, run_id: str, ranks: int) -> None:
        self._path = loss_path(directory, run_id)
        self._ranks = ranks
        self._queue: Queue[Line | None] = Queue(KEPT)
        self._waiting: deque[Line] = deque(maxlen=KEPT)
        self._lines = 0
        self._has_failed = False
        self._thread = threading.Thread(target=self._work, name="trainmover-losses", daemon=True)
        self._thread.start()

    def add(self, step: int, lineage: int, values: Mapping[str, str]) -> None:
        """Write one step down, some time soon. Does not block."""
        line = Line(step=step, lineage=lineage, ranks=self._ranks, values=dict(values))
        try:
            self._queue.put_nowait(line)
        except Full:
            self._fail("the storage does not keep up")

    def close(self, timeout_s: float) -> None:
        """Give the thread so long to write what it has."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except Full:
            return
        self._thread.join(timeout_s)

    def _work(self) -> None:
        line = self._queue.get()
        while line is not None:
            self._waiting.append(line)
            if self._queue.empty():
                self._write()
            line = self._queue.get()
        self._write()

    def _write(self) -> None:
        try:
            if not self._waiting or not self._path.parent.is_dir():
                return
            data = b"".join(msgspec.json.encode(line) + b"\n" for line in self._waiting)
            with open(self._path, "ab") as file:
                file.write(data)
            self._lines += len(self._waiting)
            self._waiting.clear()
            if self._lines > KEPT:
                self._cut()
        except OSError as error:
            self._fail(str(error))

    def _cut(self) -> None:
        """Keep the newer half."""
        lines = self._path.read_bytes().splitlines(keepends=True)[-KEPT // 2 :]
        half = self._path.with_name(f".{self._path.name}.tmp")
        half.write_bytes(b"".join(lines))
        half.replace(self._path)
        self._lines = len(lines)

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            log.warning("%s can't be written: %s; the job goes on", self._path, reason)
        self._has_failed = True


def loss_path(directory: str, run_id: str) -> Path:
    """Where the losses of a run lie among its checkpoints."""
    return Path(directory) / f"losses-r{hashing.checksum(run_id.encode())[:6]}.jsonl"


def is_directory(place: str) -> bool:
    """Whether checkpoints go to a directory rather than to an object store."""
    return bool(place) and "://" not in place


def losses_of(lines: Iterable[Line], first_step: int, ranks: int) -> dict[int, dict[str, str]]:
    """What a run logged from `first_step` on, the last lineage's of each value."""
    found: dict[int, tuple[int, dict[str, str]]] = {}
    for line in lines:
        if line.step < first_step or line.ranks != ranks:
            continue
        lineage, values = found.get(line.step, (-1, {}))
        if line.lineage >= lineage:
            found[line.step] = (line.lineage, {**values, **line.values})
    return {step: values for step, (_, values) in sorted(found.items())}
