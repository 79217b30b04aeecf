"""The agent's process: one machine's link, nursery, workers' socket and decider.

Decides nothing about the job. A restarted agent finds its nursery and workers by their socket and
adopts them. Run it with `python -m trainmover.daemons.agent_daemon OPTIONS.json`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any, assert_never

from trainmover import agent
from trainmover.agent import Exit, Kill, Launch, ToController, ToWorkerLink
from trainmover.daemons import settings as settings_of
from trainmover.daemons.fencing import fence
from trainmover.daemons.launching import fork_request, own_settings
from trainmover.daemons.leaving import AgentNotices
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
from trainmover.daemons.snapshot_plane import SnapshotPlane, Surroundings
from trainmover.edges import clock, probes, seal
from trainmover.edges.agent_link import AgentLink, AgentLinkHandlers
from trainmover.edges.launcher import Launcher, NurserySettings, log_tail
from trainmover.edges.pages import Pages
from trainmover.edges.worker_link import WorkerLinkHandlers, WorkerLinkServer
from trainmover.errors import AuthenticationFailed, ConfigError, LocalProtocolError
from trainmover.protocol import exits
from trainmover.protocol.addresses import joined
from trainmover.protocol.messages import JobSpec, WorkerLaunch, WorkerStatus
from trainmover.protocol.nursery import Exited, Forked, ForkedWorker, ForkFailed
from trainmover.topology.keeping import Keeping, read_keeping

log = logging.getLogger("agent")

LOG_TAIL_BYTES = 8000
DRAIN_LIMIT_S = 2.0
LAST_WORDS_S = 0.25
"""Longest wait for the end of a dead worker's link: what it said last must not be overtaken by the
news of its end. A child that has inherited the connection must not hold the news back for long."""


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
                on_unlinked=self._unlink_worker,
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
        self._unheard: dict[str, agent.ProcessExited] = {}
        """Ends of workers whose link has not been read to its end."""
        self._early: list[agent.Event] = []
        """Events of adopted workers that reconnect before the decider exists."""
        self._plane = SnapshotPlane(
            Surroundings(
                machine=self._machine,
                host=options.host,
                secret=self._job_secret,
                keeping=self._keeping,
                post=self._post_from_thread,
            )
        )
        self._notices = AgentNotices(options, self._settings, self._ask_to_leave)
        self._events_of: asyncio.AbstractEventLoop | None = None
        self._exit: Exit | None = None
        self._is_parent_gone = False
        self._starting: asyncio.Task[Any] | None = None

    async def run(self) -> int:
        """Until the decider ends the agent; its exit code."""
        self._make_runtime()
        self._starting = asyncio.current_task()
        self._events_of = asyncio.get_running_loop()
        await self._workers.start()
        self._launcher.on_spawn = lambda _: self._write_pids()
        if self._options.is_embedded:
            watch_parent(self._lose_parent)
        self._notices.take_signals(asyncio.get_running_loop())
        try:
            up = await self._launcher.start()
        except asyncio.CancelledError:
            return await self._end()
        count = len(up.workers)
        log.info("nursery %d: warm in %.1f s, %d workers live", up.pid, up.warm_seconds, count)
        if up.thread_count > 1:
            log.warning("the nursery has more than one thread: workers start by fork and exec")
        loop = self._make_loop(up.workers)
        self._plane.start()
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
        self._plane.close()
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
        return self._options.controller if found is None else joined(found.host, found.port)

    def _ask_to_leave(self, asked: agent.StopAsked) -> None:
        if self._loop is None:
            self._stop()  # nothing runs here yet
        self._post(asked)

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

    def _post_from_thread(self, event: agent.Event) -> None:
        loop = self._events_of
        if loop is None or loop.is_closed():
            return  # the agent has ended meanwhile
        loop.call_soon_threadsafe(self._post, event)

    def _job(self) -> JobSpec | None:
        phase = None if self._loop is None else self._loop.state.phase
        return getattr(phase, "spec", None)

    def _job_secret(self) -> bytes | None:
        spec = self._job()
        return None if spec is None else seal.channel_secret(self._token, spec.run_id)

    def _keeping(self) -> Keeping:
        spec = self._job()
        if spec is None:
            return read_keeping(self._options.settings)
        return read_keeping(own_settings(self._options, spec.settings))

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
                self._hear_exit(
                    agent.ProcessExited(
                        incarnation=name, exit_code=exit_code, signal=number, log_tail=tail
                    )
                )
            case _ as never:
                assert_never(never)

    def _hear_exit(self, exited: agent.ProcessExited) -> None:
        if not self._workers.is_linked(exited.incarnation):
            self._post(exited)
            return
        self._unheard[exited.incarnation] = exited
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._post_exit, exited.incarnation)

    def _unlink_worker(self, incarnation: str) -> None:
        self._post(agent.WorkerUnlinked(incarnation=incarnation))
        self._post_exit(incarnation)

    def _post_exit(self, incarnation: str) -> None:
        exited = self._unheard.pop(incarnation, None)
        if exited is not None:
            self._post(exited)

    async def _feel_pulse(self) -> None:
        interval_s = float(str(self._settings["agent.heartbeat_interval_s"])) / 2
        while True:
            await asyncio.sleep(interval_s)
            self._notices.look()
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
                fence(self._pages, incarnation, body)
                self._workers.send(incarnation, body)
            case Exit():
                self._exit = command
                self._stop()
            case _ if self._plane.act(command):
                return
            case _:
                raise LocalProtocolError(f"no hands for {type(command).__name__}")

    def _launch(self, launch: WorkerLaunch, spec: JobSpec) -> None:
        name = launch.incarnation
        self._log_paths[name] = str(self._directory.worker_log(name))
        self._local_ranks[name] = launch.local_rank
        self._launcher.launch(
            fork_request(
                self._options,
                launch,
                spec,
                token=self._token,
                agent_socket=self._socket,
                progress_path=str(self._pages.open(name)),
            )
        )

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
