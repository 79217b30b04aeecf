"""Embedded mode: plays all machines of a job on this host, and ends everything it started.

Decides only what a machine's own init system would: a controller that dies is started again; an
agent that dies alone (its nursery lives) is started again and adopts its workers; an agent that
dies together with its nursery was a whole machine, and stays dead. What signals ask for is decided
in `stop_signals`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Final

import msgspec

from trainmover.daemons import processes
from trainmover.daemons.child import Child, how_ended, wait_for_ends
from trainmover.daemons.grace import grace_of
from trainmover.daemons.nurseries import Nurseries
from trainmover.daemons.options import AgentOptions, ControllerOptions
from trainmover.daemons.plan import JobPlan, Screen
from trainmover.daemons.process import CRASHED
from trainmover.daemons.records import ConsoleLine, read_lines
from trainmover.daemons.run_directory import (
    ControllerFile,
    FailureFile,
    JobFile,
    OutcomeFile,
    RunDirectory,
    is_alive,
    mark_owner,
    read_struct,
    sweep_runtime,
    write_struct,
)
from trainmover.daemons.stop_signals import StopSignals
from trainmover.edges import first_process, probes, seal
from trainmover.edges.launcher import log_tail
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol import exits
from trainmover.protocol.addresses import joined
from trainmover.protocol.messages import JobSpec
from trainmover.topology.keeping import read_keeping

__all__ = ["JobPlan", "Screen", "Supervisor"]

POLL_S: Final = 0.05
CONSOLE_INTERVAL_S: Final = 0.25
CONTROLLER_START_LIMIT_S: Final = 30.0
MAX_CONTROLLER_RESTARTS: Final = 20
MAX_AGENT_RESTARTS: Final = 20
JUDGE_AFTER_S: Final = 0.3
STABLE_AFTER_S: Final = 60.0
"""A daemon that has lived this long starts with a clean record of restarts."""
OWN_END_LIMIT_S: Final = 3.0
END_LIMIT_S: Final = 12.0
ALONE_LIMIT_S: Final = 1.0
"""How long a controller without machines is given to end by itself."""
BURY_INTERVAL_S: Final = 1.0


class Supervisor:
    """One embedded job. `run` blocks until it has ended and nothing of it is left."""

    def __init__(self, plan: JobPlan, screen: Screen) -> None:
        self._plan = plan
        self._screen = screen
        self.directory = RunDirectory(plan.run_directory.resolve())
        self._controller: Child
        self._agents: list[Child] = []
        self._nurseries: Nurseries | None = None
        self._client: OperatorClient | None = None
        self._found: ControllerFile | None = None
        self._signals = StopSignals(screen, grace_of(plan.settings, plan.ends_at_wall_s))
        self._buried_at = 0.0
        self._alone_since = 0.0
        self._console_at = 0.0
        self._console_seen = 0

    def run(self) -> int:
        """Start, watch, end; the job's exit code. Raises ConfigError before anything started."""
        self._prepare()
        self._signals.install()
        try:
            self._start()
            code = self._watch()
        finally:
            self._end_all()
            self._screen.close()
            self._signals.restore()
        return code

    # -------------------------------------------------------------------------- start

    def _prepare(self) -> None:
        if not Path(self._plan.script).is_file():
            raise ConfigError(f"no script at {self._plan.script}")
        sweep_runtime()
        self.directory.create()
        if self.directory.journal.exists():
            raise ConfigError(
                f"{self.directory.path} holds the journal of an earlier job; "
                "choose another --job or --run-dir"
            )
        problems = (*probes.preflight(self.directory.path), first_process.shell_in_front())
        for problem in filter(None, problems):
            self._screen.line("warning", problem)
        self.directory.clear_runtime()
        mark_owner(self.directory.runtime)
        seal.write_token(self.directory.token, seal.new_token())

    def _start(self) -> None:
        plan, path = self._plan, self.directory.path
        spec = JobSpec(
            job=plan.job or path.name,
            run_id=f"{plan.job or path.name}-{uuid.uuid4().hex[:12]}",
            script=str(Path(plan.script).resolve()),
            arguments=plan.arguments,
            world_size=plan.machines * plan.workers_per_machine,
            workers_per_machine=plan.workers_per_machine,
            settings=plan.settings,
            working_directory=os.getcwd(),
            log_directory=str(self.directory.logs),
        )
        job = JobFile(
            job=spec.job,
            run_id=spec.run_id,
            script=spec.script,
            supervisor_pid=os.getpid(),
            supervisor_start=probes.start_time(os.getpid()),
            started_wall_s=time.time(),
        )
        write_struct(path / "job.json", job)
        self._nurseries = Nurseries(plan, self.directory)
        options = ControllerOptions(
            run_directory=str(path),
            spec=spec,
            machines=plan.machines,
            standbys=plan.standbys,
            host=plan.host,
            port=plan.port,
            is_embedded=True,
            resume=plan.resume,
            topology=plan.topology,
        )
        self._controller = self._spawn("controller", "controller_daemon", options)
        found = self._wait_for_controller()
        address = joined(found.host, found.port)
        for name in plan.machine_names:
            self._agents.append(self._spawn(name, "agent_daemon", self._agent(name, address, spec)))

    def _agent(self, name: str, address: str, spec: JobSpec) -> AgentOptions:
        return AgentOptions(
            machine=name,
            controller=address,
            run_directory=str(self.directory.path),
            token_file=str(self.directory.token),
            host=self._plan.host,
            settings=spec.settings,
            script=spec.script,
            entry=self._plan.entry,
            is_cold=self._plan.is_cold,
            orphan_timeout_s=self._plan.orphan_timeout_s,
            is_nursery_provided=True,
            is_embedded=True,
            ends_at_wall_s=self._plan.ends_at_wall_s,
        )

    def _spawn(self, name: str, module: str, options: msgspec.Struct) -> Child:
        path = self.directory.path / "options" / f"{name}.json"
        write_struct(path, options)
        full = f"trainmover.daemons.{module}"
        return Child(name=name, options=path, module=full, process=self._popen(name, full, path))

    def _respawn(self, child: Child) -> None:
        child.let_go()
        child.started_at = time.monotonic()
        child.process = self._popen(child.name, child.module, child.options)

    def _popen(self, name: str, module: str, options: Path) -> subprocess.Popen[bytes]:
        with open(self.directory.logs / f"{name}.stderr", "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, str(options)],
                stdin=subprocess.PIPE,  # closed by the kernel when we die, however we die
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **self._plan.environment},
            )

    def _wait_for_controller(self) -> ControllerFile:
        # It may have to read a whole checkpoint first.
        checkpoint = read_keeping(self._plan.settings).checkpoint
        reading_s = checkpoint.load_timeout_s if checkpoint.is_on else 0.0
        deadline = time.monotonic() + CONTROLLER_START_LIMIT_S + reading_s
        while time.monotonic() < deadline:
            found = self._find_controller()
            if found is not None:
                return found
            if self._controller.process.poll() is not None:
                raise ConfigError(self._last_line("controller"))
            time.sleep(POLL_S)
        raise ConfigError(
            f"the controller did not listen within {CONTROLLER_START_LIMIT_S:g} s; "
            f"see {self.directory.logs / 'controller.log'}"
        )

    def _last_line(self, name: str) -> str:
        lines = log_tail(self.directory.logs / f"{name}.stderr", 4000).strip().splitlines()
        if not lines:
            return f"{name} ended without a word"
        return lines[-1].removeprefix("trainmover controller: ").removeprefix("trainmover agent: ")

    # -------------------------------------------------------------------------- watch

    def _watch(self) -> int:
        while True:
            if self._controller.process.poll() is not None and not self._revive_controller():
                return self._verdict()
            for child in self._agents:
                if not child.is_gone and child.process.poll() is not None:
                    self._judge_agent(child)
            hopeless = self._find_hopeless()
            if hopeless:
                self._screen.line("failure", hopeless)
                return self._verdict()
            self._signals.pass_on(self._client, self._controller.process.pid)
            if self._signals.level >= 3:
                self._screen.line("end", "every process of the job is killed")
                outcome = self.outcome()
                return exits.INTERRUPTED if outcome is None else outcome.code
            self._bury_orphans()
            self._refresh()
            time.sleep(POLL_S)

    def _find_hopeless(self) -> str:
        """Why nothing can come of this job any more; empty while something can."""
        if all(child.is_gone for child in self._agents) and not self._has_guests():
            # The controller may be about to say that they had all done what they were there for.
            self._alone_since = self._alone_since or time.monotonic()
            if time.monotonic() - self._alone_since > ALONE_LIMIT_S:
                return "no machine is left"
        return self._nurseries.failure() if self._nurseries is not None else ""

    def _has_guests(self) -> bool:
        """Whether an agent that was started by hand takes part in this job."""
        ours = {child.process.pid for child in self._agents}
        names = (path.stem for path in self.directory.machine_file("any").parent.glob("*.json"))
        found = (processes.machine_of(self.directory, name) for name in names)
        return any(
            each.agent_pid not in ours and is_alive(each.agent_pid, 0)
            for each in found
            if each is not None
        )

    def _revive_controller(self) -> bool:
        child = self._controller
        if read_struct(self.directory.path / "outcome.json", OutcomeFile) is not None:
            return False
        code = child.process.returncode
        if code == exits.BAD_USAGE or child.restarts >= MAX_CONTROLLER_RESTARTS:
            self._screen.line("failure", self._last_line("controller"))
            return False
        is_stable = time.monotonic() - child.started_at > STABLE_AFTER_S
        child.restarts = 1 if is_stable else child.restarts + 1
        text = f"the controller {how_ended(code)}; training goes on, restarting it"
        self._screen.line("warning", text)
        self._respawn(child)
        return True

    def _find_controller(self) -> ControllerFile | None:
        """Where the running controller listens, once it does; keeps a client for it."""
        found = read_struct(self.directory.path / "controller.json", ControllerFile)
        if found is None or found.pid != self._controller.process.pid:
            return None
        if found != self._found:
            self._found = found
            token = seal.read_token(self.directory.token)
            self._client = OperatorClient(found.host, found.port, token, timeout_s=3.0)
        return found

    def _judge_agent(self, child: Child) -> None:
        now = time.monotonic()
        child.dead_since = now if child.dead_since is None else child.dead_since
        if now - child.dead_since < JUDGE_AFTER_S:
            return  # whatever ended the agent may be ending its nursery just now
        code = child.process.returncode
        child.dead_since = None
        found = processes.machine_of(self.directory, child.name)
        has_nursery = found is not None and processes.is_here_to_stay(
            found.nursery_pid, found.nursery_start
        )
        is_accident = code < 0 or code == CRASHED
        if is_accident and has_nursery and child.restarts < MAX_AGENT_RESTARTS:
            is_stable = now - child.started_at > STABLE_AFTER_S
            child.restarts = 1 if is_stable else child.restarts + 1
            text = f"the agent of {child.name} {how_ended(code)}; its workers go on, restarting it"
            self._screen.line("warning", text)
            self._respawn(child)
            return
        child.is_gone = True
        if found is not None:
            processes.kill_session(found.nursery_pid, found.nursery_start)
        if is_accident:
            self._screen.line(
                "warning", f"machine {child.name} is gone (its agent {how_ended(code)})"
            )
        elif code not in (exits.COMPLETED, exits.INTERRUPTED):
            line = self._last_line(child.name)
            self._screen.line("warning", f"machine {child.name} left with code {code}: {line}")

    def _bury_orphans(self) -> None:
        now = time.monotonic()
        if not first_process.is_first() or now - self._buried_at < BURY_INTERVAL_S:
            return
        self._buried_at = now
        nurseries = self._nurseries.pids() if self._nurseries is not None else []
        ours = [child.process.pid for child in (self._controller, *self._agents)]
        first_process.bury_orphans([*ours, *nurseries])

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._console_at < CONSOLE_INTERVAL_S:
            return
        self._console_at = now
        if self._find_controller() is None or self._client is None:
            return  # it is starting
        try:
            news = self._client.get("console", after=self._console_seen)
        except TrainMoverError:
            return  # it is being restarted; the next pass says so
        for line in news["lines"]:
            self._console_seen = max(self._console_seen, line["sequence"])
            self._screen.line(line["kind"], line["text"])
        self._screen.progress(news["status"], news["last"])

    # ---------------------------------------------------------------------------- end

    def _show_last_news(self) -> None:
        """What the controller wrote down after it was asked last; it can't be asked any more."""
        for line in read_lines(self.directory.path / "console.jsonl", ConsoleLine):
            if line.sequence > self._console_seen and line.kind != "end":
                self._screen.line(line.kind, line.text)

    def _verdict(self) -> int:
        self._show_last_news()
        outcome = read_struct(self.directory.path / "outcome.json", OutcomeFile)
        if outcome is None:
            codes = [child.process.poll() for child in (self._controller, *self._agents)]
            if exits.CONTROLLER_LOST in codes:
                return exits.CONTROLLER_LOST
            return codes[0] if codes[0] is not None and codes[0] > 0 else exits.START_FAILED
        return outcome.code

    def failure(self) -> FailureFile | None:
        """The first exception of the script, if there was one."""
        return read_struct(self.directory.path / "failure.json", FailureFile)

    def outcome(self) -> OutcomeFile | None:
        """How the job ended; None when it was killed."""
        return read_struct(self.directory.path / "outcome.json", OutcomeFile)

    def _end_all(self) -> None:
        """Wait for agents that end by themselves, then end the rest; nothing is left behind."""
        children = [*self._agents]
        if hasattr(self, "_controller"):
            children.append(self._controller)
        if self._signals.level < 3:
            has_outcome = (self.directory.path / "outcome.json").exists()
            wait_for_ends(children, OWN_END_LIMIT_S if has_outcome else 0.5)
            for child in self._agents:
                # Not linked when the job ended: it is told that we are gone, and ends at once.
                child.let_go()
            wait_for_ends(children, END_LIMIT_S)
        if self._client is not None:
            self._client.close()
        for child in children:
            child.end()
        for name in self._plan.machine_names:
            found = processes.machine_of(self.directory, name)
            if found is not None:
                processes.kill_session(found.nursery_pid, found.nursery_start)
                self.directory.machine_file(name).unlink(missing_ok=True)
        if self._nurseries is not None:
            self._nurseries.end()
        self.directory.clear_runtime()
