"""A whole job in one process: controller, agents, workers, channels, disk, time; from one seed.

Decides only what the outside world decides: delays, losses, who dies when. Everything else is
decided by the real deciders. Checks the invariants after every observation.
"""

from __future__ import annotations

import hashlib
import random
from functools import partial

import msgspec

from trainmover import agent, controller
from trainmover.checks import Checker, Observation, Violation
from trainmover.protocol import exits
from trainmover.protocol.journal import (
    AbortRecorded,
    AnyRecord,
    CommitRecorded,
    IncidentOpened,
    PlanRecorded,
    StoppedRecorded,
    encode_record,
)
from trainmover.protocol.messages import FromAgentMessage, JobSpec, ToAgentMessage
from trainmover.simulation import cutting, earlier, faults, numbers
from trainmover.simulation.channels import Channel
from trainmover.simulation.commander import Commander
from trainmover.simulation.machine import Machine
from trainmover.simulation.memory import Copy, Memory
from trainmover.simulation.process import Process
from trainmover.simulation.restorable import restorable_version
from trainmover.simulation.scenario import Scenario
from trainmover.simulation.schedule import Schedule
from trainmover.worker.lifecycle import LifecycleConfig

HANDSHAKE_S = 0.003
VERSIONS_LIMIT = 16
"""Copies of one rank that nobody may need all at once."""
CONNECT_S = 0.2
"""An agent's attempts to reach the controller."""


class World:
    """Everything of one seed."""

    def __init__(self, scenario: Scenario, *, keeps_trace: bool = False) -> None:
        self.scenario = scenario
        self.random = random.Random(f"world {scenario.seed}")
        self.schedule = Schedule()
        reference = numbers.reference(
            scenario.world_size,
            scenario.steps,
            changes_in_tail=scenario.changes_in_tail,
            is_sharded=scenario.is_sharded,
            has_tail_collective=scenario.has_tail_collective,
        )
        self.checker = Checker(reference)
        self.violations: list[Violation] = []
        self.keeps_trace = keeps_trace
        self.lines: list[str] = []
        self.digest = hashlib.blake2b(digest_size=8)
        self.ids = 0
        self.lifecycle_config = LifecycleConfig(
            without=scenario.without, controller_timeout_s=300.0, gate_timeout_s=60.0
        )
        self.agent_config = agent.Config()
        names = tuple(f"m{index}" for index in range(scenario.machines + scenario.standbys))
        self.controller_config = controller.Config(
            machine_names=names, standby_machines=scenario.standbys
        )
        self.spec = JobSpec(
            job="simulated",
            run_id="run",
            script="train.py",
            world_size=scenario.world_size,
            workers_per_machine=scenario.workers_per_machine,
            settings=scenario.settings,
        )
        self.processes: dict[str, Process] = {}
        self.commander = Commander(self)
        self.machines = {name: Machine(self, name) for name in names}
        self.cuts: dict[tuple[str, str], int] = {}
        """Path between two machines (or a machine and the controller) to the instant it heals."""
        self.rendezvous: dict[tuple[int, str, str], dict[str, Process]] = {}
        self.shards: dict[tuple[int, int], Copy] = {}
        """Durable, by number and rank; they count only in a committed checkpoint."""
        self.durable: dict[str, dict[int, Copy]] = {}
        """Committed checkpoints by name."""
        self.finished_ranks: set[int] = set()
        self.has_script_failed = False
        self.is_stop_requested = False
        self.asked_to_leave: set[str] = set()
        self.losses: list[str] = []
        self.armed: list[faults.Strike] = []
        self.has_begun = False
        self.restorable: int | None = None
        """Step that could have been restored when the job said that it can't."""

    # ------------------------------------------------------------------ what the rest needs

    def next_id(self) -> int:
        """A number that was never given before."""
        self.ids += 1
        return self.ids

    def delay_ns(self, typical_s: float) -> int:
        """A random delay around `typical_s`, now and then much longer."""
        factor = self.random.uniform(0.3, 1.7)
        if self.random.random() < 0.02:
            factor *= 8
        return round(typical_s * factor * 1e9)

    def machine_list(self) -> list[Machine]:
        """All machines, by name."""
        return [self.machines[name] for name in sorted(self.machines)]

    def path(self, one: str, other: str) -> tuple[str, str]:
        """The path between two machines, the same from both ends."""
        return (one, other) if one < other else (other, one)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets from one machine to the other now."""
        return self.cuts.get(self.path(one, other), 0) > self.schedule.now

    def check_memory(self, memory: Memory) -> None:
        """C9 has another side: what is kept is bounded, where slots wait (decision 0008)."""
        versions: dict[int, int] = {}
        for rank, _ in memory.peers:
            versions[rank] = versions.get(rank, 0) + 1
        worst = max(versions.values(), default=0)
        if worst > VERSIONS_LIMIT and self.scenario.slots_wait:
            self.fail("C9", f"{memory.machine.name} keeps {worst} versions of one rank")

    def observe(self, event: Observation) -> None:
        """Check the invariants."""
        for violation in self.checker.observe(event):
            self.violations.append(violation)
            self.note(f"VIOLATION {violation}")
        if self.keeps_trace:
            self.note(f"  {type(event).__name__} {event}")

    def journaled(self, record: AnyRecord) -> None:
        """A record is durable."""
        causes = (exits.CANNOT_RESTORE, exits.START_FAILED)
        if isinstance(record, StoppedRecorded) and record.code in causes:
            self.restorable = restorable_version(self)
        if isinstance(record, PlanRecorded | CommitRecorded | AbortRecorded):
            self.moment("decision")
            if isinstance(record, AbortRecorded):
                self.moment("aborted")
        elif isinstance(record, IncidentOpened):
            self.moment("frozen")
        if isinstance(record, PlanRecorded) and record.plan.kind != "form":
            self.moment("switch")
        self.digest.update(encode_record(record))
        for violation in self.checker.append(record):
            self.violations.append(violation)
            self.note(f"VIOLATION {violation}")
        if self.keeps_trace:
            self.note(f"  {record}"[:600])

    def fail(self, invariant: str, text: str) -> None:
        """Something else that must not happen."""
        self.violations.append(Violation(invariant=invariant, text=text))
        self.note(f"VIOLATION {invariant}: {text}")

    def finished(self, process: Process) -> None:
        """A rank may end: COMPLETE is journaled, and it has done all steps."""
        self.finished_ranks.add(process.life.rank)
        if not self.checker.book.is_complete:
            self.fail("C6", f"{process.name} finishes before COMPLETE is journaled")
        is_early = process.life.applied.step != self.scenario.steps
        if is_early and not self.may_stop:
            step = process.life.applied.step
            self.fail("P2", f"{process.name} finishes at step {step} of {self.scenario.steps}")

    @property
    def may_stop(self) -> bool:
        """Whether somebody has asked for an end, or for every machine with a rank."""
        return self.is_stop_requested or len(self.asked_to_leave) >= self.scenario.machines

    def note(self, text: str) -> None:
        """A line of the trace."""
        if self.keeps_trace:
            self.lines.append(f"{self.schedule.now / 1e9:10.4f} {text}")

    def trace(self, who: str, event: msgspec.Struct, reason: str) -> None:
        """One move of a decider."""
        if self.keeps_trace and (reason or type(event).__name__ != "Tick"):
            name = type(event).__name__
            inner = getattr(event, "body", None)
            inside = getattr(inner, "body", inner)
            if type(inside).__name__ == "Heartbeat":
                return
            what = f"{name}({type(inside).__name__})" if inner is not None else name
            detail = str(inside if inner is not None else event)[:300]
            self.note(f"{who} <- {what}: {reason} | {detail}")

    # ------------------------------------------------------------------ channels

    def connect(self, one: Process, other: Process, number: int) -> None:
        """Two workers shake hands for generation `number`."""
        healed_at = self.cuts.get(self.path(one.machine, other.machine), 0)
        at = max(self.schedule.now + self.delay_ns(HANDSHAKE_S), healed_at)

        def established() -> None:
            if not (one.is_alive and other.is_alive):
                return
            channel = Channel(self, (one, other))
            one.defer(lambda: self._opened(one, other, channel, number))
            other.defer(lambda: self._opened(other, one, channel, number))

        self.schedule.at(at, established)

    def _opened(self, end: Process, peer: Process, channel: Channel, number: int) -> None:
        switch = end.life.switch
        if switch is None or switch.plan.number != number:
            channel.fail("no such generation here", by=end)
            return
        cutting.opened(end, peer.name, channel)

    # ------------------------------------------------------------------ control links

    def link_soon(self, machine: Machine) -> None:
        """The agent connects as soon as there is a path and somebody at the other end."""
        delay = self.delay_ns(CONNECT_S)
        life = machine.life

        def attempt() -> None:
            if life != machine.life or not machine.is_agent_alive or machine.is_linked:
                return
            healed_at = self.cuts.get(self.path("controller", machine.name), 0)
            if not self.commander.is_alive or self.commander.end is not None:
                return
            if healed_at > self.schedule.now:
                self.schedule.at(healed_at + 1, attempt)
                return
            machine.link += 1
            machine.is_linked = True
            machine.commander = self.commander
            self.commander.feed(controller.AgentLinked(machine=machine.name))
            machine.feed(agent.LinkUp())

        self.schedule.at(self.schedule.now + delay, attempt)

    def unlink(self, machine: Machine) -> None:
        """The connection is gone; both ends notice at once, and the agent tries again."""
        if not machine.is_linked:
            return
        machine.is_linked = False
        machine.link += 1
        machine.commander.feed(controller.AgentUnlinked(machine=machine.name))
        machine.feed(agent.LinkDown())
        self.link_soon(machine)

    def start_second_controller(self) -> None:
        """An engine starts another controller although the first one lives; agents move over."""
        old = self.commander
        if not old.is_alive or old.end is not None:
            return
        self.commander = Commander(self)
        self.commander.succeed(old)
        for machine in self.machine_list():
            delay_s = self.random.choice((0.05, 0.5, 6.0)) * self.random.uniform(0.2, 1.0)
            self.schedule.after(delay_s, partial(self._move_over, machine, old))

    def _move_over(self, machine: Machine, old: Commander) -> None:
        if machine.commander is old:
            self.unlink(machine)

    def unlink_after(self, machine: Machine, delay_s: float) -> None:
        """The other end of a dark machine notices late."""
        link = machine.link

        def notice() -> None:
            if machine.link == link:
                self.unlink(machine)

        self.schedule.after(delay_s, notice)

    def copies(self, *, is_sure: bool) -> tuple[float, ...]:
        """Extra delay of each copy of a message that arrives: none, one or two."""
        if is_sure:
            return (0.0,)
        if self.random.random() < self.scenario.loss:
            return ()
        if self.scenario.overtaken and self.random.random() < self.scenario.overtaken:
            return (self.random.choice((0.01, 0.3, 3.0)),)
        is_twice = self.random.random() < self.scenario.duplication
        return (0.0, self.random.choice((0.01, 0.3, 3.0))) if is_twice else (0.0,)

    def link_arrival(self, machine: Machine, direction: str, extra_s: float) -> int:
        """When a message arrives; late copies overtake nothing but are overtaken."""
        at = self.schedule.now + self.delay_ns(self.scenario.link_delay_s)
        at = max(at, self.cuts.get(self.path("controller", machine.name), 0))
        if extra_s:
            return at + self.delay_ns(extra_s)
        key = f"link {direction}"
        at = max(at, machine.last_arrival.get(key, 0))
        machine.last_arrival[key] = at
        return at

    def arrive_at_controller(self, machine: Machine, link: int, body: FromAgentMessage) -> None:
        """An agent's message is there, unless its link is gone."""
        if link == machine.link and machine.is_linked:
            machine.commander.feed(controller.FromAgent(machine=machine.name, body=body))

    def send_to_agent(self, sender: Commander, name: str, body: ToAgentMessage) -> None:
        """Over the link of that machine, if it leads to the sender."""
        machine = self.machines.get(name)
        if machine is None or not machine.is_linked or machine.commander is not sender:
            return
        is_sure = type(body).__name__ in ("Welcome", "Refused")
        for extra_s in self.copies(is_sure=is_sure):
            at = self.link_arrival(machine, "down", extra_s)
            arrive = machine.arrive_late if extra_s else machine.arrive
            place = machine.life if extra_s else machine.link
            self.schedule.at(at, partial(arrive, place, body))

    # ------------------------------------------------------------------ the run

    def begin(self) -> None:
        """Power on."""
        self.commander.start()
        late_s = earlier.leave(self)
        for machine in self.machine_list():
            after_s = self.random.uniform(0.0, 0.5) + late_s.get(machine.name, 0.0)
            self.schedule.after(after_s, machine.start)
        for fault in self.scenario.faults:
            if fault.is_early:
                self.schedule.after(fault.at_s, faults.Strike(self, fault))

    def training_began(self) -> None:
        """The first step of the job runs: the other faults' time counts from here."""
        if self.has_begun:
            return
        self.has_begun = True
        for fault in self.scenario.faults:
            if not fault.is_early:
                self.schedule.after(fault.at_s, faults.Strike(self, fault))

    def moment(self, name: str) -> None:
        """Something that a fault may wait for happens now."""
        if self.armed:
            faults.moment(self, name)
