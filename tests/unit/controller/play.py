"""A stage for stories: the real controller, and actors for agents and workers that answer at once.

Actors do what a well-behaved worker does; a story silences, kills or contradicts them. Nothing is
random and no time passes unless the story says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.unit.controller.actor import Actor

from trainmover import controller
from trainmover.protocol import journal
from trainmover.protocol import messages as m
from trainmover.units import Instant, seconds

ZERO = Instant(0)


@dataclass
class Stage:
    """Everything outside the controller."""

    machines: int = 4
    standby: int = 1
    workers_per_machine: int = 1
    config: controller.Config | None = None
    restored: controller.Restored | controller.Unchosen | None = None
    settings: tuple[tuple[str, str], ...] = ()
    now: Instant = ZERO
    term: int = 1
    records: list[journal.AnyRecord] = field(default_factory=list)
    actors: dict[str, Actor] = field(default_factory=dict)
    linked: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    sent: list[tuple[str, m.Message]] = field(default_factory=list)
    replies: list[m.OperatorReply] = field(default_factory=list)
    looks: list[controller.LookIntoStorage] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    silenced: Callable[[str, m.Message], bool] = lambda name, body: False
    crash_at: str = ""
    ended: controller.EndJob | None = None
    facts: dict[str, m.Facts] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    labels: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    _queue: list[controller.Event] = field(default_factory=list)

    # ------------------------------------------------------------------ set-up

    def __post_init__(self) -> None:
        world = self.machines * self.workers_per_machine
        self.spec = m.JobSpec(
            job="j",
            run_id="r",
            script="train.py",
            world_size=world,
            workers_per_machine=self.workers_per_machine,
            settings=self.settings,
        )
        names = tuple(f"m{index}" for index in range(self.machines + self.standby))
        if self.config is None:
            self.config = controller.Config(machine_names=names, standby_machines=self.standby)
        self.names = names
        self._start()

    def _start(self) -> None:
        self.records.append(journal.TermTaken(term=self.term))
        first = controller.initial_state(
            self.config, self.spec, self.records, self.term, self.now, self.restored
        )
        self._take(first)

    def form(self) -> Stage:
        """Every machine registers; the first generation passes a gate; standbys get ready."""
        for name in self.names:
            self.hello(name)
        self.gate()
        return self

    def hello(self, name: str) -> None:
        """An agent links and registers."""
        self.linked.add(name)
        self.dead.discard(name)
        hello = m.AgentHello(
            machine=name,
            incarnation=self.agents.get(name, f"agent-{name}"),
            facts=self.facts.get(name, m.Facts(must_equal=(("torch", "2.13"),))),
            labels=self.labels.get(name, ()),
            workers=self._statuses(name),
        )
        self.agent(name, hello)
        self._introduce(name)

    def _statuses(self, name: str) -> tuple[m.WorkerStatus, ...]:
        return tuple(
            m.WorkerStatus(
                incarnation=actor.incarnation,
                local_rank=actor.local_rank,
                pid=1,
                generation=actor.generation,
                step=actor.version.step,
                gate=actor.version.step - 1,
                process_state="T" if actor.is_stopped else "S",
            )
            for actor in self.actors.values()
            if actor.machine == name
        )

    # ------------------------------------------------------------------ events

    def feed(self, event: controller.Event) -> None:
        """One event and everything that follows at the same instant."""
        self._queue.append(event)
        while self._queue and self.ended is None:
            self._take(controller.transition(self.state, self._queue.pop(0), self.now))

    def agent(self, machine: str, body: m.Message) -> None:
        """A message of an agent, if it is linked."""
        if machine in self.linked and machine not in self.dead:
            self.feed(controller.FromAgent(machine=machine, body=body))

    def worker(self, name: str, body: m.Message) -> None:
        """A message of a worker."""
        machine = (
            self.actors[name].machine if name in self.actors else name.split(".", maxsplit=1)[0]
        )
        self.agent(machine, m.FromWorker(machine=machine, incarnation=name, body=body))

    def operator(self, body: m.Message) -> m.OperatorReply:
        """A request; the latest answer."""
        self.feed(controller.FromOperator(body=body))
        return self.replies[-1]

    def wait(self, seconds_: float, step_s: float = 0.5) -> None:
        """Time passes; living agents send heartbeats."""
        end = self.now + seconds(seconds_)
        while self.now < end and self.ended is None:
            self.now = Instant(min(end, self.now + seconds(step_s)))
            for name in sorted(self.linked - self.dead):
                beat = m.Heartbeat(
                    machine=name, incarnation=f"agent-{name}", workers=self._statuses(name)
                )
                self.agent(name, beat)
            self.feed(controller.Tick())

    # ------------------------------------------------------------------ faults

    def exit(self, name: str, signal: int | None = 9) -> None:
        """A worker's process ends."""
        actor = self.actors.pop(name, None)
        if actor is not None:
            code = None if signal is not None else 0
            body = m.WorkerExited(
                machine=actor.machine, incarnation=name, exit_code=code, signal=signal
            )
            self.agent(actor.machine, body)

    def kill_machine(self, name: str) -> None:
        """Agent and workers are gone at once; their links close, peers notice."""
        lost = [a for a in self.actors.values() if a.machine == name]
        for actor in lost:
            del self.actors[actor.incarnation]
        self.dead.add(name)
        self.linked.discard(name)
        self.feed(controller.AgentUnlinked(machine=name))
        for actor in lost:
            if actor.rank >= 0:
                self.break_to(actor.incarnation)

    def break_to(self, peer: str) -> None:
        """Every member loses its connection to `peer`."""
        actors = [self.actors.get(member.incarnation) for member in self.members()]
        said = []
        for actor in actors:
            if actor is not None and actor.incarnation != peer:
                actor.edges = (m.Edge(peer=peer, reason="reset"),)
                said.append(actor.broken())
        for body in said:
            self.worker(body.incarnation, body)

    def crash(self) -> None:
        """The controller dies and lives again; agents register again."""
        self._queue.clear()
        self.crash_at = ""
        self.term += 1
        self._start()
        for name in sorted(self.linked - self.dead):
            self.hello(name)

    def _introduce(self, machine: str) -> None:
        for actor in [a for a in self.actors.values() if a.machine == machine]:
            self.worker(actor.incarnation, actor.up())
            if actor.rank < 0:
                self.worker(actor.incarnation, actor.ready(actor.local_rank))

    # ------------------------------------------------------------------ training

    def gate(self, count: int = 1) -> None:
        """All members pass gates."""
        for _ in range(count):
            for member in self.members():
                actor = self.actors[member.incarnation]
                is_first = actor.version.lineage != actor.generation
                step = actor.version.step
                actor.version = m.Version(step=step + 1, lineage=actor.generation)
                actor.is_building = False
                if is_first:
                    body = m.FirstGate(
                        incarnation=actor.incarnation, generation=actor.generation, step=step
                    )
                    self.worker(actor.incarnation, body)

    def finish(self, *, is_stopped: bool = False) -> None:
        """All members pass the finish gate."""
        for member in self.members():
            actor = self.actors.get(member.incarnation)
            if actor is not None:
                body = m.FinishPassed(
                    incarnation=actor.incarnation,
                    generation=actor.generation,
                    step=actor.version.step,
                    is_stopped=is_stopped,
                )
                self.worker(actor.incarnation, body)

    def members(self):
        membership = self.state.membership
        return membership.members if membership is not None else ()

    def name(self, rank: int) -> str:
        """Incarnation that plays `rank`."""
        return self.members()[rank].incarnation

    def machine(self, rank: int) -> str:
        """Machine that plays `rank`."""
        return self.members()[rank].machine

    @property
    def phase(self) -> str:
        return type(self.state.phase).__name__

    def recorded(self, kind: type) -> list:
        return [record for record in self.records if isinstance(record, kind)]

    # ------------------------------------------------------------------ the controller's commands

    def _take(self, move: controller.Transition) -> None:
        self.state = move.state
        assert controller.violations(self.state) == ()
        self.reasons.append(move.reason)
        for command in move.commands:
            match command:
                case controller.Append(record=record):
                    data = journal.encode_record(record)
                    self.records.append(journal.decode_record(data))
                case controller.ToOperator(reply=reply):
                    self.replies.append(reply)
                case controller.PhaseReached(name=name):
                    self.phases.append(name)
                    if self.crash_at == name:
                        self.crash()
                        return
                case controller.LookIntoStorage():
                    self.looks.append(command)
                case controller.EndJob():
                    self.ended = command
                case controller.ToAgent(machine=machine, body=body):
                    if machine in self.linked:
                        self._to_agent(machine, body)

    def _to_agent(self, machine: str, body: m.Message) -> None:
        self.sent.append((machine, body))
        if machine in self.dead or self.silenced(machine, body):
            return
        match body:
            case m.LaunchWorkers(launches=launches):
                for launch in launches:
                    self._launch(launch)
            case m.KillWorker(incarnation=incarnation):
                if self.actors.pop(incarnation, None) is not None:
                    exited = m.WorkerExited(
                        machine=machine, incarnation=incarnation, exit_code=None, signal=9
                    )
                    self._later(machine, exited)
            case m.ToWorker(incarnation=incarnation, body=inner):
                actor = self.actors.get(incarnation)
                is_deaf = actor is None or actor.is_stopped or self.silenced(incarnation, inner)
                if not is_deaf:
                    self._to_worker(actor, inner)
            case m.StopAgent() | m.Refused():
                for name in [a.incarnation for a in self.actors.values() if a.machine == machine]:
                    del self.actors[name]
                self.linked.discard(machine)
                self._queue.append(controller.AgentUnlinked(machine=machine))

    def _later(self, machine: str, body: m.Message) -> None:
        self._queue.append(controller.FromAgent(machine=machine, body=body))

    def _say(self, actor: Actor, body: m.Message) -> None:
        message = m.FromWorker(machine=actor.machine, incarnation=actor.incarnation, body=body)
        self._later(actor.machine, message)

    def _launch(self, launch: m.WorkerLaunch) -> None:
        if launch.incarnation in self.actors:
            return
        actor = Actor(
            incarnation=launch.incarnation,
            machine=launch.machine,
            local_rank=launch.local_rank,
        )
        self.actors[launch.incarnation] = actor
        started = m.WorkerStarted(
            machine=launch.machine,
            incarnation=launch.incarnation,
            local_rank=launch.local_rank,
            pid=1,
        )
        self._later(launch.machine, started)
        self._say(actor, actor.up())

    def _to_worker(self, actor: Actor, body: m.Message) -> None:
        name = actor.incarnation
        match body:
            case m.BecomeStandby(as_rank=as_rank):
                self._say(actor, actor.ready(as_rank))
            case m.Prepare(plan=plan):
                self._say(actor, m.PhaseOneReady(incarnation=name, number=plan.number))
            case m.RaiseFlag(number=number):
                version = m.Version(step=actor.version.step + 1, lineage=actor.generation)
                actor.version = version
                self._say(actor, m.AtBoundary(incarnation=name, number=number, version=version))
            case m.PlanIssued(plan=plan):
                self._prepare(actor, plan)
            case m.Commit(number=number):
                self._commit(actor, number)
            case m.Abort(number=number):
                if actor.prepared == number:
                    actor.prepared = 0
            case m.Freeze(number=number):
                if number > actor.promise:
                    actor.promise = number
                    self._say(actor, actor.report(number, self.spec.world_size))
            case m.Release() | m.Complete():
                del self.actors[name]
                exited = m.WorkerExited(
                    machine=actor.machine, incarnation=name, exit_code=0, signal=None
                )
                self._later(actor.machine, exited)

    def _prepare(self, actor: Actor, plan: m.Plan) -> None:
        actor.prepared = plan.number
        actor.prepared_version = plan.target
        if actor.rank >= 0:
            actor.version = plan.target
            actor.has_entered = False
        self._say(actor, actor.done(plan))

    def _commit(self, actor: Actor, number: int) -> None:
        if actor.generation == number:
            again = m.CommitAcknowledged(incarnation=actor.incarnation, number=number)
            self._say(actor, again)
        if actor.prepared != number:
            return
        actor.prepared = 0
        rank = self.state.membership.rank_of(actor.incarnation)
        if rank is None:
            return
        actor.rank, actor.generation, actor.version = rank, number, actor.prepared_version
        actor.promise, actor.edges, actor.has_entered = number, (), False
        actor.broken_state, actor.is_half_rolled_back = "", False
        name = actor.incarnation
        self._say(actor, m.CommitAcknowledged(incarnation=name, number=number))
        if self.state.is_fresh:
            tracked = m.Tracked(
                incarnation=name, rank=rank, identity=actor.identity, names_digest=1
            )
            self._say(actor, tracked)
