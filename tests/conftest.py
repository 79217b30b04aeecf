"""Shared by all tiers: a process test must leave nothing behind.

Decides what counts as left behind: processes that inherited this test's mark, shared memory of
ours, ports that this process still listens on. The time limit per test is set in pyproject.toml.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

MARK = "TRAINMOVER_TEST_MARK"
TIERS_WITH_PROCESSES = ("process", "drill", "cases")
GRACE_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
# multiprocessing keeps these for the life of the pytest process; they belong to no test.
HOUSEKEEPERS = ("resource_tracker", "forkserver")

# Processes that a test starts import the tree under test, installed or not.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [SOURCE, *(p for p in [os.environ.get("PYTHONPATH")] if p and p != SOURCE)]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the tiers that start processes are watched for leftovers."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in TIERS_WITH_PROCESSES:
            item.add_marker(pytest.mark.usefixtures("nothing_left_behind"))


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Fail the test, by name, for every process, port or shared memory it leaves; then clean up."""
    mark = uuid.uuid4().hex
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    ports, memory = listening_ports(), shared_memory()
    try:
        yield
    finally:
        os.environ.pop(MARK)
        if before is not None:
            os.environ[MARK] = before
    left = marked_processes(mark)
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = marked_processes(mark)
    complaints = [f"process {process.pid}: {command}" for process, command in left]
    for process, _ in left:
        end(process)
    complaints += [f"listening port {port}" for port in sorted(listening_ports() - ports)]
    complaints += [f"shared memory {name}" for name in sorted(shared_memory() - memory)]
    if complaints:
        pytest.fail("left behind by this test:\n  " + "\n  ".join(complaints), pytrace=False)


def marked_processes(mark: str) -> list[tuple[psutil.Process, str]]:
    """Live processes that inherited `mark`, orphans included, with their command lines."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) != mark:
                continue
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue  # ended while we looked, or another user's
        if not any(word in command for word in HOUSEKEEPERS):
            found.append((process, command[:200]))
    return found


def end(process: psutil.Process) -> None:
    """Kill one leftover so that the next test starts clean."""
    try:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(timeout=5)
    except psutil.NoSuchProcess:
        return


def listening_ports() -> set[int]:
    """Ports that the pytest process itself listens on."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}


def shared_memory() -> set[str]:
    """Shared memory with our name, or of torch where its process is gone.

    Other jobs on the host have entries of their own: those are nobody's leak here.
    """
    found = set()
    for path in SHARED_MEMORY.glob("*"):
        parts = path.name.split("_")
        is_orphan = parts[0] == "torch" and parts[1:2] != [] and not is_alive(parts[1])
        if path.name.startswith("trainmover") or is_orphan:
            found.add(path.name)
    return found


def is_alive(pid: str) -> bool:
    """True unless `pid` is a number without a process."""
    return not pid.isdigit() or psutil.pid_exists(int(pid))
