"""One simulated worker process: the real lifecycle decider on a fake runtime.

Carries out the lifecycle's commands as worker/runtime.py does with real tensors: channels, gate,
training step and state transfer are in `attempt` and `cutting`; here are process life, dispatch and
what of it the checker observes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainmover.checks import observations as seen
from trainmover.protocol.messages import (
    Edge,
    FromWorkerBody,
    Plan,
    Report,
    ToWorkerBody,
    Version,
    WorkerStatus,
)
from trainmover.simulation import attempt, cutting, fetching, increments, loading, tails
from trainmover.simulation.channels import (
    Ask,
    Channel,
    CutMark,
    CutOverWork,
    Data,
    Frame,
    GateFrame,
    Part,
    Personal,
    Poison,
    TailData,
)
from trainmover.simulation.memory import Slots
from trainmover.simulation.numbers import Numbers, first
from trainmover.worker import events as worker_events
from trainmover.worker import lifecycle
from trainmover.worker.lifecycle_state import InGate, Parked, Rehearsing, RunningOut

if TYPE_CHECKING:
    from trainmover.simulation.machine import Machine

EXIT_DELAY_S = 0.02


class Process:
    """A worker process from launch to end."""

    def __init__(self, machine: Machine, name: str, local_rank: int) -> None:
        world = machine.world
        self.world = world
        self.host = machine
        self.machine = machine.name
        self.name = name
        self.local_rank = local_rank
        self.pid = world.next_id()
        self.is_alive = True
        self.stopped_until = 0
        self.deferred: list[Callable[[], None]] = []
        config = world.lifecycle_config
        self.life = lifecycle.initial_state(config, name, now=world.schedule.now)
        self.tick_at: int | None = None
        # the runtime's side
        self.generation = 0
        self.channels: dict[str, Channel] = {}
        self.next_channels: dict[str, Channel] = {}
        self.early: list[tuple[str, Frame]] = []
        self.marks: dict[int, set[str]] = {}
        self.asks: list[tuple[str, Ask]] = []
        self.cut_over: CutOverWork | None = None
        self.fetch: fetching.Fetch | None = None
        self.is_broken = False
        self.closed_below = 0
        self.main_life = 0
        self.is_loopback = True
        self.numbers = Numbers(0, 0, 0)
        self.personal: dict[tuple[int, Version], tuple[int, bool]] = {}
        self.increments = increments.Held(world.scenario.increments_kept)
        self.attempt: attempt.Attempt | None = None
        self.gate: attempt.Gate | None = None
        self.data: dict[tuple[int, int], int] = {}
        """(step, rank) to gradient, of the current generation."""
        self.tail: tails.Tail | None = None
        self.tail_data: dict[tuple[int, int], int] = {}
        self.kept: tails.Kept | None = None
        self.gate_frames: dict[tuple[int, int], GateFrame] = {}
        self.attempt_count = 0
        self.iterations = 0
        """Iterations since its models' bucket layout was the first one."""
        self.last_gate = -1
        self.slots = Slots()
        self.restore: Plan | None = None
        """A start from a checkpoint that is about to be made."""

    # ------------------------------------------------------------------ process life

    def defer(self, action: Callable[[], None]) -> None:
        """Run `action` now, or when the process is awake again."""
        if not self.is_alive:
            return
        if self.stopped_until > self.world.schedule.now:
            self.deferred.append(action)
            return
        action()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` in this process after about `delay_s`."""
        delay = self.world.delay_ns(delay_s)
        self.world.schedule.at(self.world.schedule.now + delay, lambda: self.defer(action))

    def stop_for(self, lasts_s: float) -> None:
        """SIGSTOP now, SIGCONT after `lasts_s`."""
        until = self.world.schedule.now + round(lasts_s * 1e9)
        self.stopped_until = max(self.stopped_until, until)
        self.world.schedule.at(self.stopped_until, self._wake)

    def _wake(self) -> None:
        if self.stopped_until > self.world.schedule.now:
            return
        waiting, self.deferred = self.deferred, []
        for action in waiting:
            self.defer(action)

    def end(self, code: int | None, signal: int | None, *, is_silent: bool = False) -> None:
        """The process is over; peers see their channels end unless the whole host went dark."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.deferred = []
        for channel in self._every_channel():
            channel.fail("ended", by=self, is_silent=is_silent)
        self.world.observe(seen.Ended(incarnation=self.name))
        self.host.process_ended(self, code, signal)

    def _every_channel(self) -> list[Channel]:
        named = [*sorted(self.channels.items()), *sorted(self.next_channels.items())]
        unique: dict[int, Channel] = {}
        for _, channel in named:
            unique[id(channel)] = channel
        return list(unique.values())

    def lose_link(self) -> None:
        """The agent is gone."""
        self.feed(worker_events.LinkDown())

    def status(self) -> WorkerStatus:
        """What the agent's probe reads of the progress page and of the operating system."""
        is_stopped = self.stopped_until > self.world.schedule.now
        return WorkerStatus(
            incarnation=self.name,
            local_rank=self.local_rank,
            pid=self.pid,
            generation=self.life.generation,
            step=self.life.applied.step,
            gate=self.last_gate,
            phase=type(self.life.main).__name__,
            process_state="T" if is_stopped else "S",
        )

    # ------------------------------------------------------------------ the decider

    def feed(self, event: worker_events.Local | ToWorkerBody) -> None:
        """One event for the lifecycle; its commands are carried out in order."""
        if not self.is_alive:
            return
        before = self.life
        move = lifecycle.transition(before, event, self.world.schedule.now)
        self.life = move.state
        self.world.trace(self.name, event, move.reason)
        self._observe_move(before, move)
        for command in move.commands:
            if self.is_alive:
                self._carry_out(command)
        if self.is_alive:
            self._plan_tick()

    def _plan_tick(self) -> None:
        due = lifecycle.next_deadline(self.life)
        if due is None or (self.tick_at is not None and self.tick_at <= due):
            return
        self.tick_at = max(due, self.world.schedule.now + 1)
        at = self.tick_at
        self.world.schedule.at(at, lambda: self.defer(lambda: self._tick(at)))

    def _tick(self, at: int) -> None:
        if self.tick_at != at:
            return
        self.tick_at = None
        due = lifecycle.next_deadline(self.life)
        if due is not None and due <= self.world.schedule.now:
            self.feed(worker_events.Tick())
        else:
            self._plan_tick()

    def _observe_move(self, before: lifecycle.WorkerState, move: lifecycle.Transition) -> None:
        for command in move.commands:
            match command:
                case worker_events.Send(body=Report(number=number)):
                    self.world.observe(seen.Reported(incarnation=self.name, number=number))
                case worker_events.ApplyGate(step=step, vector=vector):
                    self._observe_apply(before, move, step, vector)
                case worker_events.FinishMain():
                    self.world.finished(self)
                case _:
                    pass

    def _observe_apply(
        self,
        before: lifecycle.WorkerState,
        move: lifecycle.Transition,
        step: int,
        vector: tuple[int, ...],
    ) -> None:
        is_passed = isinstance(before.main, InGate) and not before.is_broken
        by_plan = 0 if is_passed or move.state.switch is None else move.state.switch.plan.number
        generation = before.generation
        if by_plan == 0:
            passed = seen.GatePassed(incarnation=self.name, generation=generation, step=step)
            self.world.observe(passed)
        applied = seen.Applied(
            incarnation=self.name, lineage=generation, step=step, result=vector, by_plan=by_plan
        )
        self.world.observe(applied)

    # ------------------------------------------------------------------ commands

    def _carry_out(self, command: worker_events.AnyCommand) -> None:
        match command:
            case worker_events.Send(body=body):
                self._send(body)
            case worker_events.EnterMain(rank=rank, is_loopback=is_loopback):
                self._enter_main(rank, is_loopback)
            case worker_events.Proceed(step=step):
                attempt.start(self, step)
            case worker_events.ContributeGate():
                attempt.contribute(self, command)
            case worker_events.ApplyGate(step=step, vector=vector):
                attempt.apply_gate(self, step, vector)
            case worker_events.UndoStep(step=step):
                attempt.undo(self, step)
            case worker_events.BreakGeneration(edges=edges):
                attempt.break_generation(self, edges)
            case worker_events.CloseGates(below=below):
                self.closed_below = max(self.closed_below, below)
            case worker_events.PreparePhaseOne(plan=plan):
                cutting.prepare_phase_one(self, plan)
            case worker_events.CutOver(plan=plan):
                cutting.start(self, plan)
            case worker_events.CommitGeneration(number=number, target_step=target_step):
                cutting.commit(self, number, target_step)
            case worker_events.AbortGeneration(number=number):
                cutting.abort(self, number)
            case worker_events.LeaveMain() | worker_events.FinishMain():
                self.later(EXIT_DELAY_S, lambda: self.end(0, None))
            case worker_events.StopWorker(code=code):
                self.world.note(f"{self.name} stops with {code}: {command.reason}")
                self.end(code, None)

    def _send(self, body: FromWorkerBody) -> None:
        self.host.from_worker(self, body)

    def _enter_main(self, rank: int, is_loopback: bool) -> None:
        self.main_life += 1
        life = self.main_life
        self.is_loopback = is_loopback
        self.attempt = self.tail = self.kept = None
        self.gate = None
        self.attempt_count = 2 if is_loopback else 0
        self.iterations = self.attempt_count * self.world.scenario.closure_calls

        def built() -> None:
            if life != self.main_life:
                return
            if is_loopback:
                self.at_boundary(0)
                return
            self.numbers = first(rank, is_sharded=self.world.scenario.is_sharded)
            loading.restore(self, self.restore, begun)

        def begun() -> None:
            if life != self.main_life:
                return
            self.observe_step()
            self.at_boundary(self.life.applied.step)
            if not self.is_broken:
                attempt.send_personal(self, self.life.applied, self.numbers.own, is_final=True)

        self.later(self.world.scenario.build_s, built)

    def at_boundary(self, step: int) -> None:
        """`main` reports the top of `step`."""
        event = worker_events.BoundaryReached(
            step=step,
            identity=self.identity(),
            names_digest=17,
            attempts=self.attempt_count,
            sequence_digest="settled",
            can_go_back=tails.can_go_back(self, step),
            has_first_buckets=self.iterations < attempt.LAID_OUT,
        )
        self.feed(event)

    def identity(self) -> str:
        """Of the bulk state; a standby's is that of the rank it is built as."""
        if not self.world.scenario.is_sharded:
            return "all"
        main = self.life.main
        rank = main.as_rank if isinstance(main, Rehearsing | Parked) else self.life.rank
        plan = self.life.switch.plan if self.life.switch is not None else None
        given = plan.membership.rank_of(self.name) if plan is not None else None
        return f"shard {rank if given is None else given}"

    def observe_step(self) -> None:
        """Tell the checker where this rank is."""
        event = seen.StepReached(
            incarnation=self.name,
            generation=self.generation,
            step=self.life.applied.step if self.attempt is None else self.attempt.step + 1,
            rank=self.life.rank,
            digest=self.numbers.digest(),
        )
        self.world.observe(event)

    # ------------------------------------------------------------------ frames

    def receive(self, channel: Channel, sender: Process, frame: Frame) -> None:
        """A frame has arrived."""
        peer = sender.name
        known = self.channels.get(peer) is channel or self.next_channels.get(peer) is channel
        if not known:
            return
        if isinstance(frame, CutMark):
            self.marks.setdefault(frame.generation, set()).add(peer)
            cutting.advance(self)
            return
        if isinstance(frame, Ask | Part):
            cutting.on_transfer(self, peer, frame)
            return
        if isinstance(frame, Poison):
            event = worker_events.Poisoned(
                generation=frame.generation, peer=peer, edges=frame.edges
            )
            self.feed(event)
            return
        if frame.generation > self.generation:
            self.early.append((peer, frame))
            if isinstance(frame, Personal):
                cutting.take_early_personal(self)
            else:
                self.feed(worker_events.NextGenerationFrame(generation=frame.generation))
            return
        if frame.generation == self.generation:
            self.consume(frame)

    def consume(self, frame: Data | TailData | GateFrame | Personal) -> None:
        """A frame of the current generation."""
        match frame:
            case Personal():
                attempt.store_personal(self, frame)
            case Data(step=step, rank=rank, value=value):
                self.data[step, rank] = value
                attempt.check_complete(self)
            case TailData(step=step, rank=rank, value=value):
                self.tail_data[step, rank] = value
                tails.check(self)
            case GateFrame():
                self.gate_frames[frame.step, frame.round] = frame
                attempt.advance_gate(self, is_receiving=True)

    def flush_early(self) -> None:
        """Frames that came before the commit did."""
        waiting, self.early = self.early, []
        for _, frame in waiting:
            if isinstance(frame, Data | TailData | GateFrame | Personal):
                if frame.generation == self.generation:
                    self.consume(frame)
                elif frame.generation > self.generation:
                    self.early.append(("", frame))

    def channel_broken(self, channel: Channel, edge: Edge) -> None:
        """A channel has ended; which generation that concerns is seen from its use."""
        if self.channels.get(edge.peer) is channel:
            event = worker_events.ChannelBroken(generation=self.generation, edge=edge)
            self.feed(event)
        elif self.next_channels.get(edge.peer) is channel and self.cut_over is not None:
            number = self.cut_over.plan.number
            self.feed(worker_events.ChannelBroken(generation=number, edge=edge))
        elif self.next_channels.get(edge.peer) is channel and self.life.switch is not None:
            number = self.life.switch.plan.number
            self.feed(worker_events.ChannelBroken(generation=number, edge=edge))

    def is_running_out(self) -> bool:
        """Whether `main` is between a break and its boundary."""
        return isinstance(self.life.main, RunningOut)
