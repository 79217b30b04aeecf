"""Memory that is left: of the machine, and of every group above the process."""

from __future__ import annotations

from pathlib import Path

from trainmover.edges.memory_left import available_bytes

MIB = 1 << 20


def machine(folder: Path, mebibytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 9 kB\nMemAvailable: {mebibytes * 1024} kB\n")
    return path


def group(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached * MIB}\n")


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    told = tmp_path / "cgroup"
    told.write_text("0::/outer/inner\n")
    groups = tmp_path / "groups"
    group(groups / "outer" / "inner", "max", 10)
    group(groups / "outer", str(100 * MIB), 90, cached=5)
    assert available_bytes(machine(tmp_path, 500), told, groups) == 15 * MIB


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert available_bytes(machine(tmp_path, 500), nowhere, nowhere) == 500 * MIB
    assert available_bytes(nowhere, nowhere, nowhere) is None


def test_this_machine_says_something() -> None:
    found = available_bytes()
    assert found is not None and found > 0
