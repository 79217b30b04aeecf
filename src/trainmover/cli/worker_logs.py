"""Workers' output, merged: files by generation and rank under the job's log directory.

``logs/g1/rank2.log`` holds what rank 2 printed in generation 1; ``logs/worker-ID.log`` what a
process printed before it had a rank. Lines are cut at line ends only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

READ_BYTES: Final = 1024 * 1024
"""At most per file and look, so that ten megabytes of output don't hold up the rest."""


@dataclass(frozen=True, order=True)
class LogName:
    """Whose output a file holds."""

    generation: int
    rank: int
    process: str
    path: Path = field(compare=False)

    @property
    def prefix(self) -> str:
        """``[rank 2 g1]`` or ``[m4.0.1]``."""
        return f"[rank {self.rank} g{self.generation}]" if self.rank >= 0 else f"[{self.process}]"


def log_names(logs: Path) -> list[LogName]:
    """Every worker's log, by generation and rank; processes without a rank first."""
    found = []
    for path in logs.glob("worker-*.log"):
        process = path.stem.removeprefix("worker-")
        found.append(LogName(generation=0, rank=-1, process=process, path=path))
    for path in logs.glob("g*/rank*.log"):
        match = re.fullmatch(r"g(\d+)/rank(\d+)\.log", str(path.relative_to(logs)))
        if match:
            generation, rank = int(match.group(1)), int(match.group(2))
            found.append(LogName(generation=generation, rank=rank, process="", path=path))
    return sorted(found)


class WorkerLogs:
    """Follows all logs of a job; files that appear later are found."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._offsets: dict[Path, int] = {}

    def news(self) -> Iterator[tuple[str, str]]:
        """Prefix and line of everything complete that was written since the last call."""
        for name in log_names(self._logs):
            for line in self._read(name.path):
                yield name.prefix, line

    def _read(self, path: Path) -> list[str]:
        offset = self._offsets.get(path, 0)
        try:
            if os.path.getsize(path) <= offset:
                return []
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(READ_BYTES)
        except OSError:
            return []  # being written to elsewhere, or gone: logs are best effort
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < READ_BYTES:
            return []
        data = data[: end or len(data)]
        self._offsets[path] = offset + len(data)
        return data.decode("utf-8", "replace").splitlines()
