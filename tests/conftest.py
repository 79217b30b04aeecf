"""Shared by all tiers: a process test must leave nothing behind.

Decides what counts as left behind: processes that inherited this test's mark, shared memory of
ours, ports that this process still listens on. The time limit per test is set in pyproject.toml.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import warm
from trainmover.daemons.run_directory import OWNER, RunDirectory

MARK = warm.VARIABLE
TIERS_WITH_PROCESSES = ("process", "drill", "cases")
GRACE_S = 20.0
"""Processes that end by themselves do so one after the other, each when it gets a core."""
SHARED_MEMORY = Path("/dev/shm")
CACHES = ("toy-*", "tail-*")
"""Folders of undisturbed runs that several tests share."""
# multiprocessing keeps these for the life of the pytest process; they belong to no test.
HOUSEKEEPERS = ("resource_tracker", "forkserver")

# Processes that a test starts import the tree under test, installed or not.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [SOURCE, *(p for p in [os.environ.get("PYTHONPATH")] if p and p != SOURCE)]
)


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so; interrupted children would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fail the test, by name, for every process, port or shared memory it leaves; then clean up.

    Tests of the tiers that start processes are watched.
    """
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if folder not in TIERS_WITH_PROCESSES:
        yield
        return
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
    deadline = time.monotonic() + GRACE_S
    while True:
        is_late = time.monotonic() > deadline
        left, open_ports = marked_processes(mark), listening_ports() - ports
        more = shared_memory() - memory
        if is_late or not (left or open_ports or more):
            break
        if not (left or open_ports):
            more -= of_neighbours(more, tmp_path_factory.getbasetemp())
            if not more:
                break
        time.sleep(0.05)
    complaints = [f"process {process.pid}: {command}" for process, command in left]
    for process, _ in left:
        end(process)
    complaints += [f"listening port {port}" for port in sorted(open_ports)]
    more -= of_neighbours(more, tmp_path_factory.getbasetemp()) if more else set()
    complaints += [f"shared memory {name}" for name in sorted(more)]
    if complaints:
        pytest.fail("left behind by this test:\n  " + "\n  ".join(complaints), pytrace=False)


def marked_processes(mark: str) -> list[tuple[psutil.Process, str]]:
    """Live processes that inherited `mark`, orphans included, with their command lines.

    So did those that the warm process has forked: only one test runs at a time.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            own_mark = process.environ().get(MARK)
            if own_mark not in (mark, warm.MARK):
                continue
            command = " ".join(process.cmdline())
            is_fork = own_mark == warm.MARK and process.ppid() != os.getpid()
        except psutil.Error:
            continue  # ended while we looked, or another user's
        if is_fork or not any(word in command for word in HOUSEKEEPERS):
            found.append((process, command[:200]))
    return found


def end(process: psutil.Process) -> None:
    """Kill one leftover so that the next test starts clean."""
    try:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(timeout=20)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return  # the test fails by its name all the same


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
        if is_orphan or (path.name.startswith("trainmover") and not has_owner(path)):
            found.add(path.name)
    return found


def of_neighbours(names: set[str], ours: Path) -> set[str]:
    """Runtime directories among `names` of no job that ran below `ours`.

    Another suite on this host kills jobs, too; until it starts them again theirs have no owner.
    """
    folders = [ours, *(p for word in CACHES for p in Path(tempfile.gettempdir()).glob(word))]
    runs = [file.parent for folder in folders for file in folder.rglob("job.json")]
    known = {RunDirectory(run).runtime.name for run in runs}
    return {name for name in names if name.startswith("trainmover") and name not in known}


def has_owner(path: Path) -> bool:
    """Whether a live process holds the runtime directory of its job, or has just removed it."""
    try:
        with (path / OWNER).open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return not path.exists()
    return False


def is_alive(pid: str) -> bool:
    """True unless `pid` is a number without a process."""
    return not pid.isdigit() or psutil.pid_exists(int(pid))
