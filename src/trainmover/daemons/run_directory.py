"""Where a job keeps its files, and how the command line finds a running job.

    JOB/job.json          how the job was started
        token             the job's secret, 0600
        controller.json   address, pid, term
        journal.sqlite    decisions
        outcome.json      code and reason, at the end
        failure.json      the first exception of the script
        losses.jsonl      what step.log recorded
        incidents.jsonl   finished reports
        console.jsonl     what people were told
        machines/m0.json  pids of agent, nursery and workers
        logs/             of every process life; of workers by generation and rank

Sockets and progress pages live in a short directory of memory-backed storage (socket paths are
limited to 107 bytes, and a page must never wait for a disk); it goes when the job ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from trainmover.edges import probes
from trainmover.errors import ConfigError

SHARED_MEMORY: Final = Path("/dev/shm")
PREFIX: Final = "trainmover"
BASE_VARIABLE: Final = "TRAINMOVER_JOBS"

OWNER: Final = "owner"

T = TypeVar("T")


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """``job.json``: who runs the job since when."""

    job: str
    run_id: str
    script: str
    supervisor_pid: int
    supervisor_start: int
    """Kernel's start time: with the pid it names one process life."""
    started_wall_s: float


class ControllerFile(msgspec.Struct, frozen=True, kw_only=True):
    """``controller.json``: where the controller listens."""

    host: str
    port: int
    pid: int
    term: int


class OutcomeFile(msgspec.Struct, frozen=True, kw_only=True):
    """``outcome.json``: how the job ended."""

    code: int
    reason: str
    generation: int = 0
    step: int = 0


class MachineFile(msgspec.Struct, frozen=True, kw_only=True):
    """``machines/NAME.json``: the processes that play one machine."""

    machine: str
    agent_pid: int
    nursery_pid: int
    nursery_start: int = 0
    workers: tuple[tuple[str, int], ...] = ()
    """Pid of each live worker by incarnation, as of the last fork."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one job."""

    path: Path

    @property
    def journal(self) -> Path:
        """The controller's journal."""
        return self.path / "journal.sqlite"

    @property
    def token(self) -> Path:
        """The job's token, readable by this user only."""
        return self.path / "token"

    @property
    def logs(self) -> Path:
        """Logs of every process life."""
        return self.path / "logs"

    @property
    def runtime(self) -> Path:
        """Short directory for sockets and progress pages."""
        digest = hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=5).hexdigest()
        base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        return base / f"{PREFIX}-{os.getuid()}-{digest}"

    def nursery_socket(self, machine: str) -> Path:
        """Where the machine's nursery serves its agent."""
        return self.runtime / f"{machine}.n"

    def worker_log(self, incarnation: str) -> Path:
        """Output of one worker's life."""
        return self.logs / f"worker-{incarnation}.log"

    def machine_file(self, machine: str) -> Path:
        """Pids of a machine's processes."""
        return self.path / "machines" / f"{machine}.json"

    def create(self) -> None:
        """Make the directories. Raises ConfigError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.logs.mkdir(exist_ok=True)
            (self.path / "machines").mkdir(exist_ok=True)
        except OSError as error:
            text = f"the run directory {self.path} can't be made: {error.strerror or error}"
            raise ConfigError(text) from error

    def clear_runtime(self) -> None:
        """Remove sockets and pages."""
        shutil.rmtree(self.runtime, ignore_errors=True)


def write_struct(path: Path, value: msgspec.Struct) -> None:
    """Write `value` as JSON; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    os.replace(temporary, path)


def read_struct(path: Path, kind: type[T]) -> T | None:
    """Value of a file written by `write_struct`; None while there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


def is_alive(pid: int, start: int) -> bool:
    """Whether the process life named by pid and start time still lasts."""
    return (
        pid > 0
        and probes.process_state(pid) not in ("", "Z", "X")
        and (start == 0 or probes.start_time(pid) == start)
    )


def base_directory() -> Path:
    """Where run directories are kept unless told otherwise."""
    told = os.environ.get(BASE_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(told) if told else Path(cache or Path.home() / ".cache") / "trainmover" / "jobs"


class FailureFile(msgspec.Struct, frozen=True, kw_only=True):
    """``failure.json``: the first exception of the script."""

    rank: int
    step: int
    machine: str
    error: str
    text: str


def check_job_name(job: str) -> None:
    """Raises ConfigError for a name that can't be a directory's."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", job):
        raise ConfigError(f"expected a job name of letters, digits, '.', '_' and '-', got '{job}'")


def running_jobs(base: Path) -> list[RunDirectory]:
    """Jobs below `base` whose supervisor or controller is alive, by name."""
    found = []
    for path in sorted(base.glob("*/job.json")):
        directory = RunDirectory(path.parent)
        if is_running(directory):
            found.append(directory)
    return found


def is_running(directory: RunDirectory) -> bool:
    """Whether the job's supervisor lives, or its controller where nobody supervises."""
    job = read_struct(directory.path / "job.json", JobFile)
    if job is not None and is_alive(job.supervisor_pid, job.supervisor_start):
        return True
    controller = read_struct(directory.path / "controller.json", ControllerFile)
    return controller is not None and is_alive(controller.pid, 0)


def find_job(job: str | None, run_directory: Path | None) -> RunDirectory:
    """The job meant on the command line. Raises ConfigError listing the choices."""
    if run_directory is not None:
        if not (run_directory / "controller.json").exists():
            raise ConfigError(f"no job has run in {run_directory}: controller.json is missing")
        return RunDirectory(run_directory)
    base = base_directory()
    if job is not None:
        check_job_name(job)
        if not (base / job / "job.json").exists():
            names = ", ".join(directory.path.name for directory in running_jobs(base)) or "none"
            raise ConfigError(f"no job '{job}' in {base}; running jobs: {names}")
        return RunDirectory(base / job)
    running = running_jobs(base)
    if len(running) == 1:
        return running[0]
    if not running:
        raise ConfigError(f"no job is running (looked in {base}); name one with --job or --run-dir")
    names = ", ".join(directory.path.name for directory in running)
    raise ConfigError(f"{len(running)} jobs are running ({names}): choose one with --job")


def sweep_runtime() -> None:
    """Remove runtime directories of this user whose job was killed together with its supervisor.

    Whether that lives the kernel tells by its lock: process numbers mean nothing where containers
    share this storage and not their processes.
    """
    for path in SHARED_MEMORY.glob(f"{PREFIX}-{os.getuid()}-*"):
        try:
            owner = os.open(path / OWNER, os.O_RDONLY)
        except OSError:
            continue  # not ours to judge
        is_of_another_release = os.fstat(owner).st_size > 0
        if not is_of_another_release and _has_locked(owner):
            shutil.rmtree(path, ignore_errors=True)
        os.close(owner)


def mark_owner(runtime: Path) -> None:
    """Say that the directory belongs to this process, for as long as it lives."""
    runtime.mkdir(mode=0o700, exist_ok=True)
    if runtime.stat().st_uid != os.getuid():
        raise ConfigError(f"{runtime} belongs to another user")
    unlocked = runtime / f".{OWNER}"
    owner = os.open(
        unlocked, os.O_WRONLY | os.O_CREAT, 0o600
    )  # never closed: the lock goes with it
    if not _has_locked(owner):
        raise ConfigError(f"{runtime} is being taken by another process")
    unlocked.rename(runtime / OWNER)


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
