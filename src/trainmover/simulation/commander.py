"""The simulated controller's process: the real decider, a slow journal, crashes at any command.

Plays daemons/loop.py: one event at a time, commands in order, an append durable before what
follows. A crash may strike in front of an append, behind it, or between two messages; the next
life takes a higher term and reads the journal.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trainmover import controller
from trainmover.protocol import exits
from trainmover.protocol.journal import AnyRecord, PlanRecorded, TermTaken
from trainmover.simulation import loading

if TYPE_CHECKING:
    from trainmover.simulation.world import World

RESTART_S = 1.5


class Commander:
    """Controller processes, one life after another, and their journal."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.journal: list[AnyRecord] = []
        self.term = 0
        self.life = 0
        self.is_alive = False
        self.hung_until = 0
        self.state: controller.State | None = None
        self.queue: deque[controller.Event] = deque()
        self.pending: deque[controller.Command] = deque()
        self.is_busy = False
        self.tick_at: int | None = None
        self.crash_after = -1
        """Commands until the armed crash; -1: not armed."""
        self.end: controller.EndJob | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """A controller's life: take the term, read the journal, go on."""
        if self.is_alive or self.end is not None or self.world.commander is not self:
            return
        self.life += 1
        self.is_alive = True
        self.term += 1
        self._append(TermTaken(term=self.term))
        self.queue.clear()
        self.pending.clear()
        self.hung_until = 0
        self.is_busy = False
        self.tick_at = None
        self.crash_after = -1
        now = self.world.schedule.now
        move = controller.initial_state(
            self.world.controller_config,
            self.world.spec,
            tuple(self.journal),
            self.term,
            now,
            self._start_of_job(),
        )
        self.state = move.state
        self.world.trace("controller", TermTaken(term=self.term), move.reason)
        self._take(move.commands)
        for machine in self.world.machine_list():
            self.world.link_soon(machine)

    def _start_of_job(self) -> controller.Unchosen | None:
        """With disks of machines it is chosen once agents are there (see `daemons.resume`)."""
        has_begun = any(isinstance(record, PlanRecorded) for record in self.journal)
        has_disks = bool(dict(self.world.spec.settings)["checkpoint.local_directory"])
        return controller.Unchosen() if has_disks and not has_begun else None

    def succeed(self, old: Commander) -> None:
        """Begin beside a controller that still lives, on the same journal."""
        self.journal = old.journal
        self.term = old.term
        self.start()

    def crash(self) -> None:
        """SIGKILL; the supervisor starts it again."""
        if not self.is_alive or self.end is not None:
            return
        self.world.note("controller dies")
        self.is_alive = False
        self.life += 1
        for machine in self.world.machine_list():
            if machine.commander is self:
                self.world.unlink(machine)
        self.world.schedule.after(RESTART_S * self.world.random.uniform(0.3, 2.0), self.start)

    def hang(self, lasts_s: float) -> None:
        """The process is stopped for a while; nobody replaces it."""
        self.hung_until = self.world.schedule.now + round(lasts_s * 1e9)
        life = self.life
        self.world.schedule.at(self.hung_until + 1, lambda: self._go_on(life))

    # ------------------------------------------------------------------ the decider

    def feed(self, event: controller.Event) -> None:
        """Queue an event; handled once earlier commands are carried out."""
        if not self.is_alive or self.end is not None:
            return
        self.queue.append(event)
        if not self.is_busy:
            self._go_on(self.life)

    def _go_on(self, life: int) -> None:
        if life != self.life or self.world.schedule.now < self.hung_until:
            return
        self.is_busy = False
        while self.is_alive and not self.is_busy:
            if self.pending:
                self._carry_out(self.pending.popleft())
            elif self.queue:
                self._decide(self.queue.popleft())
            else:
                break
        self._plan_tick()

    def _decide(self, event: controller.Event) -> None:
        assert self.state is not None
        move = controller.transition(self.state, event, self.world.schedule.now)
        self.state = move.state
        self.world.trace("controller", event, move.reason)
        for text in controller.violations(self.state):
            self.world.fail("controller", text)
        self.pending.extend(move.commands)

    def _take(self, commands: tuple[controller.Command, ...]) -> None:
        self.pending.extend(commands)
        self._go_on(self.life)

    def _plan_tick(self) -> None:
        if not self.is_alive or self.state is None or self.end is not None or self.is_busy:
            return
        due = controller.next_deadline(self.state)
        if due is None or (self.tick_at is not None and self.tick_at <= due):
            return
        self.tick_at = max(due, self.world.schedule.now + 1)
        at, life = self.tick_at, self.life
        self.world.schedule.at(at, lambda: self._tick(at, life))

    def _tick(self, at: int, life: int) -> None:
        if life == self.life and self.tick_at == at:
            self.tick_at = None
            self.feed(controller.Tick())

    # ------------------------------------------------------------------ commands

    def _carry_out(self, command: controller.Command) -> None:
        if self._is_crashing():
            return
        match command:
            case controller.Append(record=record):
                self._append_slowly(record)
            case controller.ToAgent(machine=name, body=body):
                self.world.send_to_agent(self, name, body)
            case controller.EndJob(code=code, reason=reason):
                self.end = command
                self.world.note(f"job ends with {code}: {reason}")
            case controller.LookIntoStorage():
                self._look(command)
            case controller.ToOperator() | controller.PhaseReached():
                pass

    def _look(self, order: controller.LookIntoStorage) -> None:
        """Beside the decider: what is there when the look ends."""
        life = self.life

        def seen() -> None:
            if life == self.life:
                found = loading.seen(self.world, order)
                reason = "" if found is not None else "nothing whole was found"
                # What is there in parts is asked for by a start: never silently from zero.
                is_asked = order.is_start and found is None and self.world.scenario.earlier_steps
                code = exits.START_FAILED if is_asked else 0
                event = controller.StorageSeen(
                    number=order.number, found=found, code=code, reason=reason
                )
                self.feed(event)

        self.world.schedule.after(self.world.scenario.move_s, seen)

    def _is_crashing(self) -> bool:
        if self.crash_after < 0:
            return False
        self.crash_after -= 1
        if self.crash_after >= 0:
            return False
        self.crash()
        return True

    def _append_slowly(self, record: AnyRecord) -> None:
        delay = self.world.scenario.append_s
        if delay <= 0:
            self._append(record)
            return
        self.is_busy = True
        life = self.life

        def durable() -> None:
            if life == self.life:
                self._append(record)
                self._go_on(life)

        self.world.schedule.after(delay * self.world.random.uniform(0.5, 3.0), durable)

    def _append(self, record: AnyRecord) -> None:
        if self.world.commander is not self:
            self.world.note(f"controller of term {self.term} finds a higher term and ends")
            self.crash()
            return
        self.journal.append(record)
        self.world.note(f"journal {len(self.journal)}: {type(record).__name__}")
        self.world.journaled(record)
