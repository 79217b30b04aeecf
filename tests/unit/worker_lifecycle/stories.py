"""A worker under test and the others' words to it: how the lifecycle's stories are told."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from trainmover.protocol import flags
from trainmover.protocol.messages import Commit, Edge, Held, Plan, PlanIssued, ToWorkerBody, Version
from trainmover.topology import Member, Membership
from trainmover.units import Instant, seconds
from trainmover.worker.events import (
    AnyCommand,
    BoundaryReached,
    CutOverDone,
    GateCompleted,
    GateRequested,
    Local,
    PersonalReceived,
    Send,
    Started,
    Tick,
)
from trainmover.worker.lifecycle import LifecycleConfig, initial_state, next_deadline, transition

T = TypeVar("T")

VECTOR = (0,) * flags.FIXED_SLOTS
ME = "m0.0.a"


def members(*names: str) -> tuple[Member, ...]:
    return tuple(
        Member(rank=rank, incarnation=name, machine=name.split(".")[0], host="h", port=1 + rank)
        for rank, name in enumerate(names)
    )


def a_plan(number: int, names: tuple[str, ...], **more: object) -> Plan:
    known = {
        "kind": "unplanned",
        "base_generation": 1,
        "target": Version(step=0, lineage=1),
        "membership": Membership(generation=number, members=members(*names)),
    }
    return msgspec.convert({"number": number, **msgspec.to_builtins(known | more)}, Plan)


NAMES = (ME, "m1.0.a", "m2.0.a", "m3.0.a")
FORM = a_plan(
    1,
    NAMES,
    kind="form",
    base_generation=0,
    is_fresh_start=True,
    joiners=NAMES,
)


class Worker:
    """Feeds one lifecycle and remembers what it asked for."""

    def __init__(self, incarnation: str = ME, **config: object) -> None:
        self.now = Instant(seconds(1))
        settings = LifecycleConfig(**config)  # type: ignore[arg-type]
        self.state = initial_state(settings, incarnation, now=self.now)
        self.feed(Started(host="h", port=1, pid=7))

    def feed(self, event: Local | ToWorkerBody) -> tuple[AnyCommand, ...]:
        self.now = Instant(self.now + 1_000_000)
        move = transition(self.state, event, self.now)
        self.state = move.state
        return move.commands

    def wait(self, delay_s: float) -> tuple[AnyCommand, ...]:
        """Time passes in ticks, as the runtime would feed them."""
        end = Instant(self.now + seconds(delay_s))
        commands: tuple[AnyCommand, ...] = ()
        while (due := next_deadline(self.state)) is not None and due <= end:
            self.now = Instant(max(due, self.now))
            move = transition(self.state, Tick(), self.now)
            self.state = move.state
            commands += move.commands
        self.now = end
        return commands

    def form(self) -> Worker:
        """Become rank 0 of generation 1 and run step 0."""
        self.feed(PlanIssued(term=1, plan=FORM))
        self.cut_over_done(FORM)
        self.feed(Commit(term=1, number=1))
        self.feed(BoundaryReached(step=0, identity="all", attempts=0))
        return self

    def cut_over_done(self, plan: Plan) -> tuple[AnyCommand, ...]:
        return self.feed(CutOverDone(number=plan.number, version=plan.target))

    def hold_wards(self, step: int, lineage: int = 1) -> tuple[AnyCommand, ...]:
        commands: tuple[AnyCommand, ...] = ()
        for owner in range(4):
            held = Held(
                owner_rank=owner, version=Version(step=step, lineage=lineage), is_final=True
            )
            commands += self.feed(PersonalReceived(held=held))
        return commands

    def enter_gate(self, step: int, lineage: int = 1) -> tuple[AnyCommand, ...]:
        self.hold_wards(step + 1, lineage)
        return self.feed(GateRequested(step=step, kind=flags.STEP, flags=VECTOR))

    def pass_gate(
        self, step: int, generation: int = 1, vector: tuple[int, ...] = VECTOR
    ) -> tuple[AnyCommand, ...]:
        return self.feed(
            GateCompleted(generation=generation, step=step, kind=flags.STEP, vector=vector)
        )

    def do_step(self, step: int) -> Worker:
        self.enter_gate(step)
        self.pass_gate(step)
        self.feed(BoundaryReached(step=step + 1, attempts=step + 1))
        return self


def sent(commands: tuple[AnyCommand, ...], kind: type[T]) -> T | None:
    """The last message of `kind` among `commands`."""
    found = None
    for command in commands:
        if isinstance(command, Send) and isinstance(command.body, kind):
            found = command.body
    return found


def asked(commands: tuple[AnyCommand, ...], kind: type[T]) -> T | None:
    """The last command of `kind`."""
    found = None
    for command in commands:
        if isinstance(command, kind):
            found = command
    return found


def vector_with(switch: int = 0, stop: int = 0) -> tuple[int, ...]:
    vector = list(VECTOR)
    vector[flags.SWITCH_NUMBER] = switch
    vector[flags.STOP_REQUESTED] = stop
    return tuple(vector)


def edge(peer: str) -> Edge:
    return Edge(peer=peer, reason="reset")
