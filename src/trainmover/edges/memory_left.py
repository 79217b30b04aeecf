"""How much memory this process may still take: of the machine, and of the container it runs in.

Decides nothing. A container's limit is met by killing, not by an error, so it has to be looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

MEMORY_FILE: Final = Path("/proc/meminfo")
GROUP_FILE: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")


def available_bytes(
    memory: Path = MEMORY_FILE, group: Path = GROUP_FILE, groups: Path = GROUPS
) -> int | None:
    """Bytes that can be had without swapping or being killed; None where nobody says."""
    known = [left for left in (_of_machine(memory), *_of_groups(group, groups)) if left is not None]
    return min(known, default=None)


def _of_machine(path: Path) -> int | None:
    for line in _lines(path):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_groups(group: Path, groups: Path) -> Iterator[int | None]:
    """Every group above this process has a limit of its own."""
    for line in _lines(group):
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / place.lstrip("/")
        for each in (folder, *folder.parents):
            yield _left_in(each, names)
            if each == root:
                break


def _left_in(folder: Path, names: tuple[str, str, str]) -> int | None:
    limit, used = _number(folder / names[0]), _number(folder / names[1])
    if limit is None or used is None:
        return None
    cached = [
        line.split()[1] for line in _lines(folder / "memory.stat") if names[2] in line.split()
    ]
    return max(0, limit - used + int(cached[0] if cached else 0))


def _number(path: Path) -> int | None:
    text = next(_lines(path), "").strip()
    return int(text) if text.isdecimal() else None  # "max": no limit


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return
