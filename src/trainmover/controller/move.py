"""One move of the controller's decider while it is being made: state so far, commands so far.

Exists only inside `transition`; from outside the decider stays a function of values. Knows how to
address a worker and how to number things, and nothing about when to do either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trainmover.controller.events import Append, Command, PhaseReached, ToAgent, ToOperator
from trainmover.controller.state import Machine, Phase, State, Transition, Worker
from trainmover.protocol.journal import AnyRecord
from trainmover.protocol.messages import OperatorReply, ToAgentMessage, ToWorker, ToWorkerBody
from trainmover.units import Instant, after, seconds


class Move:
    """Collects what one event changes and causes."""

    def __init__(self, state: State, now: Instant) -> None:
        self.state = state
        self.now = now
        self.commands: list[Command] = []
        self.reasons: list[str] = []

    # ----------------------------------------------------------------- commands

    def append(self, record: AnyRecord) -> None:
        """Journal `record` before anything that follows."""
        self.commands.append(Append(record=record))

    def send(self, machine: str, body: ToAgentMessage) -> None:
        """To the agent of `machine`."""
        self.commands.append(ToAgent(machine=machine, body=body))

    def tell(self, incarnation: str, body: ToWorkerBody) -> None:
        """To a worker, through its agent; nothing for one that is over."""
        worker = self.state.workers.get(incarnation)
        if worker is not None:
            message = ToWorker(term=self.state.term, incarnation=incarnation, body=body)
            self.send(worker.machine, message)

    def tell_in_halves(self, incarnations: Iterable[str], body: ToWorkerBody, number: int) -> None:
        """To several workers, with the drill points before the first and in the middle."""
        names = list(incarnations)
        self.reached("journalled_not_sent", number)
        for index, name in enumerate(names):
            if index == (len(names) + 1) // 2:
                self.reached("sent_to_half", number)
            self.tell(name, body)

    def reply(self, reply: OperatorReply) -> None:
        """Answer the operator."""
        self.commands.append(ToOperator(reply=reply))

    def reached(self, name: str, number: int) -> None:
        """A named phase has been passed by the controller."""
        self.commands.append(PhaseReached(name=name, number=number))

    def because(self, reason: str) -> None:
        """Add a clause to the reason."""
        self.reasons.append(reason)

    # ----------------------------------------------------------------- state

    def enter(self, phase: Phase) -> None:
        """Change the phase."""
        self.state = replace(self.state, phase=phase)

    def keep_worker(self, worker: Worker) -> None:
        """Store a worker, new or changed."""
        workers = {**self.state.workers, worker.incarnation: worker}
        self.state = replace(self.state, workers=workers)

    def keep_machine(self, machine: Machine) -> None:
        """Store a machine, new or changed."""
        machines = {**self.state.machines, machine.name: machine}
        self.state = replace(self.state, machines=machines)

    def bury(self, incarnation: str) -> None:
        """Remove a worker whose process is over; it can never come back."""
        workers = {n: w for n, w in self.state.workers.items() if n != incarnation}
        retired = self.state.retired | {incarnation}
        self.state = replace(self.state, workers=workers, retired=retired)

    def note_number(self, number: int) -> None:
        """`number` is in use somewhere: never give it out."""
        if number > self.state.highest_number:
            self.state = replace(self.state, highest_number=number)

    def next_number(self) -> int:
        """A generation number above all that were ever seen (C2)."""
        number = self.state.highest_number + 1
        self.state = replace(self.state, highest_number=number)
        return number

    def next_incarnation(self, machine: str, local_rank: int) -> str:
        """A name no process ever had: the term makes it unique over controllers' lives."""
        count = self.state.launch_count + 1
        self.state = replace(self.state, launch_count=count)
        return f"{machine}.{local_rank}.{self.state.term}-{count}"

    def count_try(self, kind: str, rank: int, step: int) -> int:
        """Count one recovery of a kind for a rank at a step; how often that was now."""
        key = f"{kind} of rank {rank} at step {step}"
        count = self.state.tries.get(key, 0) + 1
        self.state = replace(self.state, tries={**self.state.tries, key: count})
        return count

    def tries_of(self, kind: str, rank: int, step: int) -> int:
        """How often this was tried."""
        return self.state.tries.get(f"{kind} of rank {rank} at step {step}", 0)

    def in_(self, delay_s: float) -> Instant:
        """The instant `delay_s` from now."""
        return after(self.now, seconds(delay_s))

    def has_waited(self, since: Instant, delay_s: float) -> bool:
        """Whether `delay_s` has passed since `since`."""
        return self.now >= after(since, seconds(delay_s))

    def done(self) -> Transition:
        """The finished move."""
        reason = "; ".join(self.reasons)
        return Transition(state=self.state, commands=tuple(self.commands), reason=reason)
