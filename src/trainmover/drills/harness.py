"""A real job, started as a user starts it, watched through what it publishes, hurt on purpose.

Decides how a drill waits (on events, each with a deadline), what it may look at (status, losses,
incidents, journal: nothing that a user can't see) and what counts as left behind. Deliberately not
here: what is done to a job (`scenario`), and whether its numbers are right (`compare`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from trainmover.daemons.records import LossRecord, read_lines, read_losses
from trainmover.daemons.run_directory import (
    ControllerFile,
    OutcomeFile,
    RunDirectory,
    read_struct,
)
from trainmover.drills import pauses, victims
from trainmover.drills.request import FOLDER_WORD, JobRequest, JobResult, MemberView
from trainmover.edges import faults
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import DrillFailed, TransportError
from trainmover.protocol.journal import IncidentReport
from trainmover.protocol.messages import FromOperatorMessage, OperatorReply, SwitchoverRequest

MARK: Final = "TRAINMOVER_DRILL_MARK"
POLL_S: Final = 0.005
LEFTOVER_GRACE_S: Final = 20.0

T = TypeVar("T")


class RunningJob:
    """One job and its processes. Leaving the block kills whatever is still there."""

    def __init__(self, request: JobRequest, folder: Path) -> None:
        self.request = request
        self.folder = folder
        self.directory = RunDirectory(folder / "run")
        self.mark = uuid.uuid4().hex
        self._client: OperatorClient | None = None
        self._address = ("", 0)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._is_awaiting = False

    # ------------------------------------------------------------------ life

    def __enter__(self) -> RunningJob:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._client is not None:
            self._client.close()
        victims.end_all(self.processes())
        if self._process is not None:
            self._process.wait(timeout=10)
        self.directory.clear_runtime()

    def start(self) -> None:
        """Start the command."""
        self.folder.mkdir(parents=True, exist_ok=True)
        marks = self.folder / pauses.MARKS
        marks.mkdir(exist_ok=True)
        environment = os.environ | {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            faults.MARKS_VARIABLE: str(marks),
            **dict(self.request.environment),
            **dict(self.request.disturbance),
        }
        if self.request.faults:
            environment[faults.VARIABLE] = self.request.faults
        self._started_s = time.monotonic()
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(
                self.command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def command(self) -> list[str]:
        """The command line that a user would type."""
        request = self.request
        command = [sys.executable, "-m", "trainmover.cli", "run", "--no-progress"]
        command += ["--machines", str(request.machines), "--standby", str(request.standbys)]
        command += ["--nproc-per-node", str(request.workers_per_machine)]
        command += ["--run-dir", str(self.directory.path)]
        for name, value in request.settings:
            command += ["--set", f"{name}={value}"]
        words = [word.replace(FOLDER_WORD, str(self.folder)) for word in request.arguments]
        return [*command, *request.flags, str(request.script), *words]

    @property
    def output_path(self) -> Path:
        """What the command has printed."""
        return self.folder / "output.txt"

    @property
    def pid(self) -> int:
        """The command's process. Raises DrillFailed before `start`."""
        if self._process is None:
            raise DrillFailed("the job was not started")
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code of the command; None while it runs."""
        return None if self._process is None else self._process.poll()

    def processes(self) -> list[Any]:
        """Every live process of the job, orphans included."""
        return victims.marked(MARK, self.mark)

    def signal(self, number: signal.Signals) -> None:
        """A signal to the command, as a terminal's Ctrl-C would send."""
        self._is_awaiting = True
        os.kill(self.pid, number)

    def wait_until_done(self, timeout_s: float | None = None) -> JobResult:
        """Until the command has ended by itself."""
        pauses.let_pass(self.folder)
        # Whatever may still be on its way to the job (a signal, a request, a fault, a script's own
        # death) is to find it in the middle of its steps.
        if not (self._is_awaiting or self.request.faults or self.request.disturbance):
            self.let_hurry()
        limit_s = timeout_s if timeout_s is not None else self.time_left()
        deadline, is_late = time.monotonic() + limit_s, False
        while self.code is None:
            if is_late:
                raise DrillFailed(f"the job has not ended after {limit_s:.0f} s; {self.tail()}")
            is_late = time.monotonic() > deadline
            time.sleep(POLL_S)
        return self.result()

    def let_hurry(self) -> None:
        """Nothing more is done to this job: scripts that pause in each step leave that out."""
        pauses.let_hurry(self.folder)

    def result(self) -> JobResult:
        """What the ended job has left. Raises DrillFailed while it runs."""
        code = self.code
        if code is None:
            raise DrillFailed("the job is still running")
        seen: set[tuple[int, int]] = set()
        repeated = []
        for record in read_lines(self.losses_path, LossRecord):
            if (record.step, record.lineage) in seen:
                repeated.append(record.step)
            seen.add((record.step, record.lineage))
        final = self.folder / "final.json"
        return JobResult(
            code=code,
            output=self.output_path.read_text(errors="replace"),
            losses={step: record.values for step, record in read_losses(self.losses_path).items()},
            repeated=tuple(repeated),
            final=msgspec.json.decode(final.read_bytes()) if final.exists() else None,
            incidents=tuple(self.incidents()),
            outcome=self.outcome_file(),
            seconds=time.monotonic() - self._started_s,
        )

    # ------------------------------------------------------------------ looking

    @property
    def losses_path(self) -> Path:
        """What ``step.log`` recorded."""
        return self.directory.path / "losses.jsonl"

    def losses(self) -> dict[int, LossRecord]:
        """The record of each step so far."""
        return read_losses(self.losses_path)

    def last_step(self) -> int:
        """Last recorded step; -1 before the first."""
        return max(self.losses(), default=-1)

    def incidents(self) -> list[IncidentReport]:
        """Finished reports, oldest first."""
        return list(read_lines(self.directory.path / "incidents.jsonl", IncidentReport))

    def status(self) -> dict[str, Any] | None:
        """What ``trainmover status --json`` says; None while the controller does not answer."""
        try:
            found: dict[str, Any] = self.operator().get("status")["status"]
        except (TransportError, OSError):
            return None
        return found

    def members(self) -> list[MemberView]:
        """Who plays which rank; empty before the first generation."""
        status = self.status() or {}
        return [
            MemberView(rank=m["rank"], machine=m["machine"], incarnation=m["incarnation"])
            for m in status.get("ranks", ())
        ]

    def member(self, rank: int) -> MemberView:
        """Who plays `rank`. Raises DrillFailed."""
        for member in self.members():
            if member.rank == rank:
                return member
        raise DrillFailed(f"nobody plays rank {rank}; {self.tail()}")

    def ready_standbys(self) -> list[str]:
        """Machines all of whose workers are standbys that can take over at once."""
        standbys = (self.status() or {}).get("standbys", ())
        counts: dict[str, int] = {}
        for standby in standbys:
            if standby["is_ready"]:
                counts[standby["machine"]] = counts.get(standby["machine"], 0) + 1
        wanted = self.request.workers_per_machine
        return [machine for machine, count in counts.items() if count >= wanted]

    def operator(self) -> OperatorClient:
        """A session with the controller. Raises TransportError while there is none."""
        found = read_struct(self.directory.path / "controller.json", ControllerFile)
        if found is None or not self.directory.token.exists():
            raise TransportError("the controller has not said where it listens")
        if self._client is None or self._address != (found.host, found.port):
            token = self.directory.token.read_text().strip()
            self._client = OperatorClient(found.host, found.port, token, timeout_s=35.0)
            self._address = (found.host, found.port)
        return self._client

    def controller_pid(self) -> int:
        """Pid of the controller that has listened last; 0 before the first."""
        found = read_struct(self.directory.path / "controller.json", ControllerFile)
        return 0 if found is None else found.pid

    def operator_port(self) -> int:
        """Port of the controller; 0 before it listens."""
        found = read_struct(self.directory.path / "controller.json", ControllerFile)
        return 0 if found is None else found.port

    def outcome_file(self) -> OutcomeFile | None:
        """How the job ended; None while nothing is decided."""
        return read_struct(self.directory.path / "outcome.json", OutcomeFile)

    def struck(self) -> list[str]:
        """Injection rules that have fired so far."""
        return sorted(path.name for path in (self.folder / "faults").iterdir())

    # ------------------------------------------------------------------ waiting

    def wait_for(self, claim: Callable[[], T | None], what: str, timeout_s: float = 60.0) -> T:
        """First truthy value of `claim`. Raises DrillFailed when the job ends or time is up."""
        deadline = time.monotonic() + min(timeout_s, self.time_left())
        while True:
            # Read first: what ended the job may have made the claim true, or we stood still.
            code, is_late = self.code, time.monotonic() > deadline
            value = claim()
            if value:
                return value
            if code is not None:
                raise DrillFailed(f"the job ended with {code} while waiting: {what}; {self.tail()}")
            if is_late:
                raise DrillFailed(f"not within {timeout_s:.0f} s: {what}; {self.tail()}")
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> int:
        """Until `step` is committed; the last committed one."""
        self.wait_for(lambda: self.last_step() >= step, f"step {step} committed", timeout_s)
        return self.last_step()

    def wait_for_standby(self, count: int = 1, timeout_s: float = 90.0) -> list[str]:
        """Until `count` standbys are ready; their machines."""

        def enough() -> list[str] | None:
            ready = self.ready_standbys()
            return ready if len(ready) >= count else None

        return self.wait_for(enough, f"{count} standbys ready", timeout_s)

    def wait_for_incidents(self, count: int, timeout_s: float = 60.0) -> list[IncidentReport]:
        """Until `count` reports are finished."""

        def enough() -> list[IncidentReport] | None:
            found = self.incidents()
            return found if len(found) >= count else None

        return self.wait_for(enough, f"{count} finished incidents", timeout_s)

    def tail(self) -> str:
        """End of what the command printed, for messages."""
        return f"its output ends:\n{victims.last_lines(self.output_path, 25)}"

    def time_left(self) -> float:
        """Seconds until the run's limit."""
        return max(0.0, self._started_s + self.request.limit_s - time.monotonic())

    # ------------------------------------------------------------------ acting

    def request_switchover(
        self, machines: tuple[str, ...], to: tuple[str, ...] = ()
    ) -> OperatorReply:
        """Ask for a planned switchover; the first answer."""
        self._is_awaiting = True
        return self.operator().request(
            SwitchoverRequest(request=uuid.uuid4().hex, machines=machines, to=to)
        )

    def switchover(
        self, machines: tuple[str, ...], to: tuple[str, ...] = (), timeout_s: float = 60.0
    ) -> OperatorReply:
        """Ask for a planned switchover and wait until it has ended. Raises DrillFailed."""
        message = SwitchoverRequest(request=uuid.uuid4().hex, machines=machines, to=to)
        return self.ask(message, timeout_s)

    def ask(self, message: FromOperatorMessage, timeout_s: float = 60.0) -> OperatorReply:
        """Send a request and wait for its last answer. Raises DrillFailed."""
        reply = self.operator().request(message)
        if not reply.is_accepted:
            raise DrillFailed(f"refused: {reply.text}")

        def ended() -> OperatorReply | None:
            try:
                return self.operator().final_reply(message.request, 0.2)
            except TransportError:
                return None

        return reply if reply.is_final else self.wait_for(ended, "the request's end", timeout_s)

    def kill_worker(self, rank: int, *, is_alone: bool = True) -> str:
        """SIGKILL the worker that plays `rank` (with its loader workers unless alone)."""
        pid, incarnation = self.worker(rank)
        if is_alone:
            victims.kill_worker_process(pid)
        else:
            victims.kill_worker_group(pid)
        return incarnation

    def worker(self, rank: int) -> tuple[int, str]:
        """Pid and incarnation of the worker that plays `rank`."""
        member = self.member(rank)
        pid = victims.worker_pid(self.directory, member.machine, member.incarnation)
        return pid, member.incarnation

    def stop_worker(self, rank: int) -> int:
        """SIGSTOP the worker that plays `rank`; its pid."""
        pid, _ = self.worker(rank)
        victims.send(pid, signal.SIGSTOP)
        return pid

    def kill_machine(self, *machines: str) -> None:
        """SIGKILL all that plays a machine, or several as if at one instant."""
        victims.kill_machines(self.directory, *machines)

    def kill_agent(self, machine: str) -> int:
        """SIGKILL the agent of `machine` alone."""
        return victims.kill_agent(self.directory, machine)

    def kill_controller(self) -> int:
        """SIGKILL the controller."""
        return victims.kill_controller(self.directory)

    def reset_connection(self, first: int, second: int) -> int:
        """Reset every connection between two ranks; how many there were."""
        return victims.reset_connections(self.worker(first)[0], self.worker(second)[0])

    # ------------------------------------------------------------------ afterwards

    def leftovers(self) -> list[str]:
        """What an ended job has left behind: processes, sockets, shared memory."""
        deadline = time.monotonic() + LEFTOVER_GRACE_S
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [f"process {process.pid}: {_command_of(process)}" for process in found]
        if self.directory.runtime.exists():
            left.append(f"directory {self.directory.runtime}")
        return left

    def assert_no_leftovers(self) -> None:
        """Raises DrillFailed naming each leftover."""
        if left := self.leftovers():
            raise DrillFailed("left behind:\n  " + "\n  ".join(left))


def _command_of(process: Any) -> str:
    try:
        return " ".join(process.cmdline())[:160]
    except Exception as error:  # it ended just now; any answer will do for a message
        return f"({type(error).__name__})"
