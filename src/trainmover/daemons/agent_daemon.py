"""The agent's process: one machine's link, nursery, workers' socket and decider.

Decides nothing about the job. A restarted agent finds its nursery and workers by their socket and
adopts them. Run it with `python -m trainmover.daemons.agent_daemon OPTIONS.json`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any, assert_never

import msgspec

from trainmover import agent
from trainmover.agent import Exit, Kill, Launch, ToController, ToWorkerLink
from trainmover.daemons import settings as settings_of
from trainmover.daemons.loop import Decider, DeciderLoop
from trainmover.daemons.options import AgentOptions, read_options
from trainmover.daemons.process import open_log, run_daemon, watch_parent
from trainmover.daemons.run_directory import (
    ControllerFile,
    MachineFile,
    RunDirectory,
    read_struct,
    write_struct,
)
from trainmover.edges import clock, probes, seal
from trainmover.edges.agent_link import AgentLink, AgentLinkHandlers
from trainmover.edges.launcher import Launcher, NurserySettings, log_tail
from trainmover.edges.pages import Pages
from trainmover.edges.worker_link import WorkerLinkHandlers, WorkerLinkServer
from trainmover.errors import AuthenticationFailed, ConfigError
from trainmover.protocol import exits
from trainmover.protocol.messages import (
    Commit,
    Fence,
    Freeze,
    JobSpec,
    Message,
    ToWorkerBody,
    WorkerLaunch,
    WorkerStatus,
)
from trainmover.protocol.nursery import Exited, Forked, ForkedWorker, ForkFailed, ForkRequest

log = logging.getLogger("agent")

LOG_TAIL_BYTES = 8000
FENCED_FOR_GOOD = -1
NO_FENCE = 0
NOT_FOR_WORKERS = (seal.TOKEN_VARIABLE,)
DRAIN_LIMIT_S = 2.0


class AgentDaemon:
    """Everything of one agent's life."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._machine = options.machine
        self._directory = RunDirectory(Path(options.run_directory))
        runtime = options.runtime_directory
        self._runtime = Path(runtime) if runtime else self._directory.runtime
        self._settings = settings_of.unflatten(options.settings)
        self._token = seal.read_token(Path(options.token_file))
        self._pages = Pages(self._runtime)
        self._local_ranks: dict[str, int] = {}
        self._log_paths: dict[str, str] = {}
        self._socket = str(self._runtime / f"{self._machine}.w")
        self._launcher = Launcher(
            NurserySettings(
                socket=str(self._runtime / f"{self._machine}.n"),
                log_path=self._directory.logs / f"nursery-{self._machine}.log",
                entry=options.entry,
                orphan_timeout_s=options.orphan_timeout_s,
                is_cold=options.is_cold,
                is_provided=options.is_nursery_provided,
            ),
            self._hear_nursery,
        )
        self._workers = WorkerLinkServer(
            self._socket,
            WorkerLinkHandlers(
                pid_of=self._launcher.pid_of,
                on_linked=self._link_worker,
                on_unlinked=lambda name: self._post(agent.WorkerUnlinked(incarnation=name)),
                on_message=lambda name, body: self._post(
                    agent.FromWorkerLink(incarnation=name, body=body)
                ),
            ),
        )
        self._link = AgentLink(
            self._find_controller,
            self._machine,
            self._token,
            AgentLinkHandlers(
                on_up=lambda: self._post(agent.LinkUp()),
                on_down=lambda _: self._post(agent.LinkDown()),
                on_message=lambda body: self._post(agent.FromController(body=body)),
            ),
        )
        self._loop: DeciderLoop[agent.State, agent.Event, agent.Command] | None = None
        self._early: list[agent.Event] = []
        """Events of adopted workers that reconnect before the decider exists."""
        self._exit: Exit | None = None
        self._is_parent_gone = False
        self._starting: asyncio.Task[Any] | None = None

    async def run(self) -> int:
        """Until the decider ends the agent; its exit code."""
        self._make_runtime()
        self._starting = asyncio.current_task()
        await self._workers.start()
        self._launcher.on_spawn = lambda _: self._write_pids()
        if self._options.is_embedded:
            watch_parent(self._lose_parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            asyncio.get_running_loop().add_signal_handler(number, self._ask_to_leave, number)
        try:
            up = await self._launcher.start()
        except asyncio.CancelledError:
            return await self._end()
        log.info(
            "nursery %d: warm in %.1f s, %d threads, %d workers live",
            up.pid,
            up.warm_seconds,
            up.thread_count,
            len(up.workers),
        )
        if up.thread_count > 1:
            log.warning("the nursery has more than one thread: workers start by fork and exec")
        loop = self._make_loop(up.workers)
        self._write_pids()
        await self._serve(loop)
        return await self._end()

    def _make_loop(
        self, live: tuple[ForkedWorker, ...]
    ) -> DeciderLoop[agent.State, agent.Event, agent.Command]:
        identity = agent.Identity(
            config=settings_of.build("agent", agent.Config, self._settings),
            machine=self._machine,
            incarnation=f"{self._machine}@{os.getpid()}.{secrets.token_hex(3)}",
            facts=probes.machine_facts(self._options.script),
            labels=self._options.labels,
        )
        for worker in live:
            self._local_ranks[worker.incarnation] = worker.local_rank
            self._pages.open(worker.incarnation)
        statuses = tuple(self._status(worker.incarnation, worker.pid) for worker in live)
        decider: Decider[Any, Any, Any] = Decider(
            transition=agent.transition, next_deadline=agent.next_deadline, tick=agent.Tick()
        )
        state = agent.initial_state(identity, clock.now(), statuses)
        self._loop = DeciderLoop(decider, state, self._act, "agent")
        for event in self._early:
            self._loop.post(event)
        return self._loop

    async def _serve(self, loop: DeciderLoop[agent.State, agent.Event, agent.Command]) -> None:
        """Run everything side by side until the decider is done; a task that fails ends it all."""
        main = asyncio.create_task(loop.run(), name="decider")
        others = [
            asyncio.create_task(self._launcher.run(), name="nursery"),
            asyncio.create_task(self._link.run(), name="link"),
            asyncio.create_task(self._feel_pulse(), name="pulse"),
        ]
        done, _ = await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
        if main in done:
            await self._link.drain(DRAIN_LIMIT_S)
        for task in (main, *others):
            task.cancel()
        results = await asyncio.gather(main, *others, return_exceptions=True)
        for result in results:
            if isinstance(result, AuthenticationFailed):
                self._exit = Exit(code=exits.BAD_USAGE, reason=str(result))
            elif isinstance(result, Exception):
                raise result

    async def _end(self) -> int:
        await self._launcher.end(0.0)
        await self._workers.close()
        for incarnation in list(self._local_ranks):
            self._pages.close(incarnation)
        self._directory.machine_file(self._machine).unlink(missing_ok=True)
        self._leave_runtime()
        code, reason = (
            (exits.INTERRUPTED, "") if self._exit is None else (self._exit.code, self._exit.reason)
        )
        log.info("ended with %d: %s", code, reason)
        if code != exits.COMPLETED and reason:
            print(f"trainmover agent: {reason}", file=sys.stderr, flush=True)
        return code

    def _leave_runtime(self) -> None:
        """The last one out removes the directory, where no supervisor is left to do it."""
        if self._options.is_embedded and self._is_parent_gone:
            (self._runtime / "owner").unlink(missing_ok=True)
        if any(self._runtime.iterdir()):
            return
        self._runtime.rmdir()

    def _make_runtime(self) -> None:
        self._runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._runtime.stat().st_uid != os.getuid():
            raise ConfigError(f"{self._runtime} belongs to another user")
        problems = probes.preflight(self._directory.path)
        for problem in problems:
            log.warning("%s", problem)
            print(f"trainmover agent: {problem}", file=sys.stderr, flush=True)

    def _find_controller(self) -> str:
        found = None
        if self._options.is_embedded:
            found = read_struct(self._directory.path / "controller.json", ControllerFile)
        return self._options.controller if found is None else f"{found.host}:{found.port}"

    def _ask_to_leave(self, number: int) -> None:
        if self._loop is None:
            self._stop()  # nothing runs here yet
        self._post(agent.StopAsked(reason=f"signal {signal.Signals(number).name}"))

    def _lose_parent(self) -> None:
        log.error("whoever started this machine is gone: workers end")
        self._is_parent_gone = True
        self._exit = Exit(code=exits.INTERRUPTED, reason="the supervisor is gone")
        self._stop()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.stop()
        elif self._starting is not None:
            self._starting.cancel()

    # ------------------------------------------------------------------------- events

    def _post(self, event: agent.Event) -> None:
        if self._loop is None:
            self._early.append(event)
        else:
            self._loop.post(event)

    def _link_worker(self, incarnation: str) -> None:
        self._post(
            agent.WorkerLinked(
                incarnation=incarnation,
                local_rank=self._local_ranks.get(incarnation, -1),
                pid=self._launcher.pids.get(incarnation, 0),
            )
        )

    def _hear_nursery(self, notice: Forked | ForkFailed | Exited) -> None:
        name = notice.incarnation
        match notice:
            case Forked(pid=pid, local_rank=local_rank):
                self._local_ranks[name] = local_rank
                self._post(agent.ProcessStarted(incarnation=name, pid=pid))
                self._write_pids()
            case ForkFailed(reason=reason):
                self._pages.close(name)
                self._post(agent.LaunchFailed(incarnation=name, reason=reason))
            case Exited(exit_code=exit_code, signal=number):
                self._local_ranks.pop(name, None)
                self._pages.close(name)
                tail = log_tail(self._log_paths.pop(name, ""), LOG_TAIL_BYTES)
                self._post(
                    agent.ProcessExited(
                        incarnation=name, exit_code=exit_code, signal=number, log_tail=tail
                    )
                )
            case _ as never:
                assert_never(never)

    async def _feel_pulse(self) -> None:
        interval_s = float(str(self._settings["agent.heartbeat_interval_s"])) / 2
        while True:
            await asyncio.sleep(interval_s)
            workers = tuple(
                self._status(name, pid) for name, pid in sorted(self._launcher.pids.items())
            )
            if workers:
                self._post(agent.Pulse(workers=workers))

    def _status(self, incarnation: str, pid: int) -> WorkerStatus:
        return self._pages.status(incarnation, self._local_ranks.get(incarnation, -1), pid)

    # ----------------------------------------------------------------------- commands

    def _act(self, command: agent.Command) -> None:
        match command:
            case Launch(launch=launch, spec=spec):
                self._launch(launch, spec)
            case Kill(incarnation=incarnation):
                self._launcher.kill(incarnation)
            case ToController(body=body):
                self._link.send(body)
            case ToWorkerLink(incarnation=incarnation, body=body):
                self._fence(incarnation, body)
                self._workers.send(incarnation, body)
            case Exit():
                self._exit = command
                self._stop()
            case _ as never:
                assert_never(never)

    def _launch(self, launch: WorkerLaunch, spec: JobSpec) -> None:
        log_path = str(self._directory.worker_log(launch.incarnation))
        self._log_paths[launch.incarnation] = log_path
        self._local_ranks[launch.incarnation] = launch.local_rank
        self._launcher.launch(
            ForkRequest(
                incarnation=launch.incarnation,
                local_rank=launch.local_rank,
                machine=self._machine,
                host=self._options.host,
                spec=msgspec.structs.replace(spec, log_directory=str(self._directory.logs)),
                agent_socket=self._socket,
                secret=seal.channel_secret(self._token, spec.run_id),
                progress_path=str(self._pages.open(launch.incarnation)),
                log_path=log_path,
                environment=self._environment(launch, spec),
            )
        )

    def _environment(self, launch: WorkerLaunch, spec: JobSpec) -> tuple[tuple[str, str], ...]:
        # The job's value, not this machine's: sums must be split alike everywhere.
        threads = dict(spec.settings).get("worker.threads", "1")
        variables = {
            name: value for name, value in os.environ.items() if name not in NOT_FOR_WORKERS
        }
        variables.update(dict(spec.environment))
        variables.update(
            LOCAL_RANK=str(launch.local_rank),
            LOCAL_WORLD_SIZE=str(spec.workers_per_machine),
            WORLD_SIZE=str(spec.world_size),
            OMP_NUM_THREADS=threads,
            MKL_NUM_THREADS=threads,
            TRAINMOVER_JOB=spec.job,
            TRAINMOVER_RUN_ID=spec.run_id,
            TRAINMOVER_MACHINE=self._machine,
            TRAINMOVER_INCARNATION=launch.incarnation,
            TORCHELASTIC_RUN_ID=spec.run_id,
        )
        return tuple(sorted(variables.items()))

    def _fence(self, incarnation: str, body: ToWorkerBody | Message) -> None:
        """The page works even while the worker's interpreter is stuck or stopped."""
        match body:
            case Freeze(number=number) if number > self._pages.read(incarnation).generation:
                self._pages.fence(incarnation, number)
            case Commit():
                # Later generations may be committed by a peer's frame before we hear of them.
                self._pages.fence(incarnation, NO_FENCE)
            case Fence():
                self._pages.fence(incarnation, FENCED_FOR_GOOD)
            case _:
                return

    def _write_pids(self) -> None:
        nursery = self._launcher.nursery_pid
        write_struct(
            self._directory.machine_file(self._machine),
            MachineFile(
                machine=self._machine,
                agent_pid=os.getpid(),
                nursery_pid=nursery,
                nursery_start=probes.start_time(nursery),
                workers=tuple(sorted(self._launcher.pids.items())),
            ),
        )


def serve(options: AgentOptions) -> int:
    """Run the agent until the job or its part in it ends; the exit code."""
    directory = RunDirectory(Path(options.run_directory))
    directory.create()
    open_log(directory.logs / f"agent-{options.machine}.log")
    return run_daemon("agent", lambda: AgentDaemon(options).run())


def main(arguments: list[str]) -> int:
    """Command line of the process."""
    options = read_options(Path(arguments[0]), AgentOptions)
    assert isinstance(options, AgentOptions)
    return serve(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
