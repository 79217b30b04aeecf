"""One simulated machine: the real agent decider, its link to the controller, its workers.

Plays the agent's daemon and nursery: launches, kills, probes; an agent killed alone is started
again and adopts what lives. A machine that dies takes everything with it, at once or silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover import agent
from trainmover.protocol.messages import (
    FromAgentMessage,
    FromWorkerBody,
    ToAgentMessage,
    ToWorkerBody,
    WorkerStatus,
)
from trainmover.simulation.memory import Copy, Memory, say_again
from trainmover.simulation.process import Process
from trainmover.worker import events as worker_events

if TYPE_CHECKING:
    from trainmover.simulation.world import World

LAUNCH_S = 0.05
KILL_S = 0.01
LOCAL_S = 0.0003
"""Delay of the socket between agent and worker."""
PULSE_S = 1.0
AGENT_RESTART_S = 1.0
SAID_ONCE = ("ScriptFailed", "WorkerExited", "LinkLost")
"""Nobody repeats these; only a broken link loses them."""


class Machine:
    """A host with one agent."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_alive = True
        self.life = 0
        """Counts agent processes; a message or tick of an earlier one is nobody's."""
        self.is_agent_alive = False
        self.is_dark = False
        """It died without a word: whoever reads from it sees no end."""
        self.has_left = False
        """The agent has ended by itself: nothing comes back here."""
        self.is_linked = False
        self.commander = world.commander
        """The controller's process that the link leads to."""
        self.link = 0
        """Counts links to the controller."""
        self.processes: dict[str, Process] = {}
        self.exits: list[agent.ProcessExited] = []
        """Ends that no agent has been told of."""
        self.last_arrival: dict[str, int] = {}
        self.tick_at: int | None = None
        self.state: agent.State | None = None
        self.memory: Memory | None = None
        self.disk: dict[str, dict[int, Copy]] = {}
        """Checkpoints on the machine's own disk; they outlive its agents."""
        self.staged: dict[tuple[int, int], Copy] = {}
        """Written there, by number and rank, and not committed yet."""
        """Of the present agent process."""

    # ------------------------------------------------------------------ agent's life

    def start(self) -> None:
        """A new agent process; it adopts the workers that live here."""
        if not self.is_alive or self.is_agent_alive or self.has_left:
            return
        self.life += 1
        self.is_agent_alive = True
        identity = agent.Identity(
            config=self.world.agent_config,
            machine=self.name,
            incarnation=f"{self.name}.agent{self.life}.{self.world.next_id()}",
        )
        live = tuple(process.status() for _, process in sorted(self._live()))
        self.state = agent.initial_state(identity, self.world.schedule.now, live)
        self.memory = None
        if self.world.scenario.snapshot_every:
            self.memory = Memory(self)
            self.memory.tell()
        for _, process in sorted(self._live()):
            self._link_worker(process, is_new=False)
        waiting, self.exits = self.exits, []
        for event in waiting:
            self.feed(event)
        self._pulse(self.life)
        self.world.link_soon(self)

    def _live(self) -> list[tuple[str, Process]]:
        return [(name, item) for name, item in self.processes.items() if item.is_alive]

    def kill_agent(self) -> None:
        """SIGKILL of the agent alone; the supervisor starts it again."""
        self._agent_gone()
        self.world.schedule.after(AGENT_RESTART_S, self.start)

    def _agent_gone(self) -> None:
        if not self.is_agent_alive:
            return
        self.is_agent_alive = False
        self.life += 1
        self.tick_at = None
        self.world.unlink(self)
        for _, process in self._live():
            process.later(LOCAL_S, process.lose_link)

    def die(self, *, is_silent: bool) -> None:
        """Power off: agent and workers at once."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.is_dark = is_silent
        self.is_agent_alive = False
        self.life += 1
        for _, process in sorted(self._live()):
            process.end(None, 9, is_silent=is_silent)
        if is_silent:
            self.world.unlink_after(self, 30.0)
        else:
            self.world.unlink(self)
        self.exits = []

    def revive(self, *, keeps_disk: bool = False) -> None:
        """The machine is back, with nothing on it but maybe its disk."""
        if self.is_alive or self.has_left:
            return
        self.world.unlink(self)
        self.is_alive = True
        self.is_dark = False
        self.processes = {}
        self.exits = []
        if not keeps_disk:
            self.disk, self.staged = {}, {}
        self.start()

    # ------------------------------------------------------------------ the decider

    def feed(self, event: agent.Event) -> None:
        """One event for the agent's decider."""
        if not self.is_agent_alive or self.state is None:
            return
        move = agent.transition(self.state, event, self.world.schedule.now)
        self.state = move.state
        if not isinstance(event, agent.Pulse | agent.Tick):
            self.world.trace(self.name, event, move.reason)
        for command in move.commands:
            if self.is_agent_alive:
                self._carry_out(command)
        self._plan_tick()

    def _plan_tick(self) -> None:
        if not self.is_agent_alive or self.state is None:
            return
        due = agent.next_deadline(self.state)
        if due is None or (self.tick_at is not None and self.tick_at <= due):
            return
        self.tick_at = max(due, self.world.schedule.now + 1)
        at, life = self.tick_at, self.life
        self.world.schedule.at(at, lambda: self._tick(at, life))

    def _tick(self, at: int, life: int) -> None:
        if self.life == life and self.tick_at == at:
            self.tick_at = None
            self.feed(agent.Tick())

    def _pulse(self, life: int) -> None:
        if life != self.life or not self.is_agent_alive:
            return
        statuses: tuple[WorkerStatus, ...] = tuple(item.status() for _, item in self._live())
        self.feed(agent.Pulse(workers=statuses))
        self.world.schedule.after(PULSE_S, lambda: self._pulse(life))

    def _carry_out(self, command: agent.Command) -> None:
        match command:
            case agent.Launch(launch=launch):
                self._launch(launch.incarnation, launch.local_rank)
            case agent.Kill(incarnation=name):
                process = self.processes.get(name)
                if process is not None and process.is_alive:
                    self.world.schedule.after(KILL_S, lambda: process.end(None, 9))
            case agent.ToController(body=body):
                self._to_controller(body)
            case agent.ToWorkerLink(incarnation=name, body=body):
                self._to_worker(name, body)
            case agent.OpenSnapshot() | agent.ShipBackups() | agent.DropSnapshots():
                self._keep(command)
            case agent.WriteShards() | agent.WriteManifest():
                self._keep(command)
            case agent.Exit(code=code):
                self.world.note(f"agent {self.name} exits with {code}: {command.reason}")
                self._exit()

    def _keep(
        self,
        command: agent.OpenSnapshot
        | agent.ShipBackups
        | agent.DropSnapshots
        | agent.WriteShards
        | agent.WriteManifest,
    ) -> None:
        assert self.memory is not None
        match command:
            case agent.OpenSnapshot(taken=taken):
                self.memory.open(taken)
            case agent.ShipBackups(order=order):
                self.memory.place(order)
            case agent.DropSnapshots(keep=keep):
                self.memory.drop(keep)
            case agent.WriteShards(order=order):
                self.memory.write(order)
            case agent.WriteManifest(order=commit):
                self.memory.commit(commit)

    def _exit(self) -> None:
        self.has_left = True
        for _, process in sorted(self._live()):
            process.end(None, 9)
        self._agent_gone()

    # ------------------------------------------------------------------ workers

    def _launch(self, name: str, local_rank: int) -> None:
        life = self.life

        def started() -> None:
            if not self.is_alive or life != self.life or name in self.processes:
                return
            process = Process(self, name, local_rank)
            self.processes[name] = process
            self.world.processes[name] = process
            self.feed(agent.ProcessStarted(incarnation=name, pid=process.pid))
            self._link_worker(process, is_new=True)

        delay = self.world.delay_ns(LAUNCH_S)
        self.world.schedule.at(self.world.schedule.now + delay, started)

    def _link_worker(self, process: Process, *, is_new: bool) -> None:
        linked = agent.WorkerLinked(
            incarnation=process.name, local_rank=process.local_rank, pid=process.pid
        )
        self.feed(linked)
        if is_new:
            up = worker_events.Started(host=self.name, port=9, pid=process.pid)
            process.later(LOCAL_S, lambda: process.feed(up))
        else:
            process.later(LOCAL_S, lambda: process.feed(worker_events.LinkUp()))
            process.later(LOCAL_S, lambda: say_again(process))

    def process_ended(self, process: Process, code: int | None, signal: int | None) -> None:
        """The nursery has reaped a worker."""
        if not self.is_alive:
            return
        event = agent.ProcessExited(incarnation=process.name, exit_code=code, signal=signal)
        life = self.life

        def tell() -> None:
            if self.is_alive and self.is_agent_alive and life == self.life:
                self.feed(event)
            elif self.is_alive:
                self.exits.append(event)
                if self.is_agent_alive:
                    self.exits.pop()
                    self.feed(event)

        self.world.schedule.after(LOCAL_S, tell)

    def _ordered(self, key: str, delay_s: float) -> int:
        at = self.world.schedule.now + self.world.delay_ns(delay_s)
        at = max(at, self.last_arrival.get(key, 0))
        self.last_arrival[key] = at
        return at

    def from_worker(self, process: Process, body: FromWorkerBody) -> None:
        """A worker's message to its agent; lost while there is none."""
        life = self.life
        if not self.is_agent_alive:
            return
        event = agent.FromWorkerLink(incarnation=process.name, body=body)

        def arrive() -> None:
            if life == self.life:
                self.feed(event)

        self.world.schedule.at(self._ordered(f"from {process.name}", LOCAL_S), arrive)

    def _to_worker(self, name: str, body: ToWorkerBody) -> None:
        process = self.processes.get(name)
        if process is None or not process.is_alive:
            return
        at = self._ordered(f"to {name}", LOCAL_S)
        self.world.schedule.at(at, lambda: process.defer(lambda: process.feed(body)))

    # ------------------------------------------------------------------ link to the controller

    def _to_controller(self, body: FromAgentMessage) -> None:
        if not self.is_linked:
            return
        inner = getattr(body, "body", body)
        is_once = type(inner).__name__ in SAID_ONCE or type(body).__name__ in SAID_ONCE
        link = self.link
        for extra_s in self.world.copies(is_sure=is_once or type(body).__name__ == "AgentHello"):
            at = self.world.link_arrival(self, "up", extra_s)
            self.world.schedule.at(at, lambda: self.world.arrive_at_controller(self, link, body))

    def arrive(self, link: int, body: ToAgentMessage) -> None:
        """A message of the controller."""
        if link == self.link and self.is_linked:
            self.feed(agent.FromController(body=body))

    def arrive_late(self, life: int, body: ToAgentMessage) -> None:
        """A second copy turns up on whatever link this agent has by then, of any term."""
        if life == self.life and self.is_linked:
            self.feed(agent.FromController(body=body))
