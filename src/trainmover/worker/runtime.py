"""A worker under an agent: the I/O side of the training process.

All decisions are the lifecycle's. Every event is fed to it on the I/O thread, one at a time, so
that it needs no lock; its commands are carried out there, in order; what only the main thread can
do (user code, tensors) becomes an order in its box.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from trainmover.communicator.communicator import Communicator
from trainmover.communicator.engine import Engine
from trainmover.communicator.settings import ChannelIdentity, CommunicatorConfig
from trainmover.edges.faults import reached
from trainmover.edges.probes import machine_facts
from trainmover.protocol import exits
from trainmover.protocol.messages import Finding, Mark, Plan, Report
from trainmover.protocol.nursery import ForkRequest
from trainmover.rehearsal.config import RehearsalConfig
from trainmover.topology import Membership
from trainmover.topology.keeping import read_keeping
from trainmover.units import Instant
from trainmover.worker import events, lifecycle, orders
from trainmover.worker.channel_events import ChannelEvents
from trainmover.worker.config import WorkerConfig, read_settings
from trainmover.worker.cut_over import CutOverRun
from trainmover.worker.dispatcher import Dispatcher
from trainmover.worker.drill_hooks import StepFaults
from trainmover.worker.exchange import Exchange
from trainmover.worker.increment_side import IncrementSide
from trainmover.worker.link import AgentLink
from trainmover.worker.main_side import MainSide
from trainmover.worker.output import redirect
from trainmover.worker.own_page import open_page
from trainmover.worker.personal import BackupStore
from trainmover.worker.rank_reads import RankReads, watch_environment
from trainmover.worker.sequence import SequenceWatch
from trainmover.worker.stepper import Stepper
from trainmover.worker.whereabouts import show_whereabouts

FLUSH_S = 0.05
"""Time for what was told last to leave."""


class Runtime:
    """Host of the main thread, events of the communicator, hands of the lifecycle."""

    def __init__(self, request: ForkRequest) -> None:
        settings = dict(request.spec.settings)
        self.request = request
        self.config = read_settings(WorkerConfig, "worker", settings)
        self.rehearsal = read_settings(RehearsalConfig, "rehearsal", settings)
        self.incarnation = request.incarnation
        self.run_id = request.spec.run_id
        self.engine = Engine()
        self.engine.on_fatal = self._io_failed
        self._channel_events = ChannelEvents(self)
        self.communicator = Communicator(
            self.engine,
            ChannelIdentity(
                job=request.spec.job, incarnation=request.incarnation, machine=request.machine
            ),
            request.secret,
            self._channel_events,
            read_settings(CommunicatorConfig, "communicator", settings),
            bind_host=request.host,
        )
        self.communicator.hear_finish(self._channel_events.peer_finished)
        self.link = AgentLink(self.engine, request.agent_socket, request.incarnation)
        self.link.on_message = self.dispatch
        self.link.on_up = self._link_up
        self.link.on_down = lambda: self.dispatch(events.LinkDown())
        self.orders = orders.OrderBox(lambda: self.engine.is_running)
        self.watch = SequenceWatch()
        self.reads = RankReads()
        self.store = BackupStore()
        self.increments = IncrementSide(self, read_keeping(request.spec.settings).snapshot)
        self.stepper: Stepper | None = None
        self.membership: Membership | None = None
        self.cut: CutOverRun | None = None
        self.phase_one: CutOverRun | None = None
        self.exchange = Exchange(self)
        self.orders.on_given = self.exchange.ordered
        self.page = open_page(request.progress_path)
        self._marks: list[Mark] = []
        self._pid = os.getpid()
        self._ordered = 0
        self._entered = 0
        self.step_faults = StepFaults(
            self._reset_one, lambda: self.host.is_running_out, request.spec.log_directory
        )
        self.start_groups: Callable[[orders.RunMain], None]
        self.host = MainSide(self)
        state = lifecycle.initial_state(
            read_settings(lifecycle.LifecycleConfig, "worker", settings),
            request.incarnation,
            facts=machine_facts(request.spec.script, self.config.threads),
            now=Instant(time.monotonic_ns()),
        )
        does_trace = self.config.does_trace
        self._dispatcher = Dispatcher(self.engine, state, self._execute, does_trace=does_trace)

    @property
    def state(self) -> lifecycle.WorkerState:
        """Of the lifecycle; any thread."""
        return self._dispatcher.state

    def is_loader_worker(self) -> bool:
        """Whether this is a fork of the worker (a DataLoader child), not the worker itself."""
        return os.getpid() != self._pid

    def is_shadow(self) -> bool:
        """Whether the script plays a rank it does not have."""
        return self.stepper is not None and self.stepper.is_shadow

    def begin_entry(self, order: orders.RunMain) -> None:
        """`main` is about to be entered as `order` says."""
        self.watch.forget()
        self.show_rank(order)
        self.reads.begin()
        self.host.begin_entry(order)
        if order.is_adoption:
            self.communicator.start_loopback(order.rank, order.world_size)
        elif order.number == self._ordered and not order.is_loopback:
            self.communicator.release()

    def show_rank(self, order: orders.RunMain) -> None:
        """What torchrun would have put into the environment; from here on `order` is obeyed."""
        self._entered = order.number
        os.environ["RANK"] = str(order.rank)
        os.environ["WORLD_SIZE"] = str(order.world_size)

    def finish_process(self, code: int) -> None:
        """The main thread has ended: last messages out, then `end_process`."""
        done = threading.Event()
        self.engine.call_later(FLUSH_S, done.set)
        done.wait(self.config.closing_grace_s)
        self.link.close()
        sys.stdout.flush()

    def start(self) -> None:
        """Open the link; the controller decides what this process becomes."""
        watch_environment(self.reads)
        self.communicator.observer = self.watch.observe
        self.communicator.on_invented = self._invented
        self.communicator.on_rank_read = self.reads.note
        show_whereabouts(self)
        self.watch.is_running_out = lambda: self.host.is_running_out
        self.watch.on_call = self._collective_entered
        self.engine.start()
        host, port = self.communicator.address
        self.post(events.Started(host=host, port=port, pid=os.getpid()))
        self.engine.submit(self.link.connect)

    # ------------------------------------------------------------------ events in

    def post_from_main(self, event: Any) -> None:
        """From the main thread; void if `main` was ordered to be entered anew meanwhile."""
        number = self._entered
        is_struck = self.step_faults.is_armed  # a drill strikes on the I/O thread
        if not is_struck and self._dispatcher.dispatch_here(event, lambda: number != self._ordered):
            return

        def dispatch() -> None:
            if number == self._ordered:
                self.dispatch(event)

        self.engine.submit(dispatch)

    def post(self, event: Any) -> None:
        """From any thread."""
        self.engine.submit(lambda: self.dispatch(event))

    def dispatch(self, event: Any) -> None:
        """On the I/O thread."""
        self._dispatcher.dispatch(event)

    def _link_up(self) -> None:
        self.host.link_up()
        self.dispatch(events.LinkUp())

    def _io_failed(self, error: BaseException) -> None:
        traceback.print_exception(error)
        self.end_process(exits.PROTOCOL_FAILED)

    # ------------------------------------------------------------------ commands out

    def _execute(self, command: events.AnyCommand) -> None:
        match command:
            case events.Send():
                self.link.send(command.body)
                if isinstance(command.body, Report):
                    self.reached("reported", command.body.number)
            case events.EnterMain():
                self._enter_main(command)
            case events.Proceed():
                self.orders.give(orders.Go(step=command.step))
            case events.ContributeGate():
                self._mark_flag(command)
                self.communicator.gate_contribute(command.step, command.kind, command.flags)
            case events.ApplyGate():
                self.page.write(gate=command.step)
                self._fault_at(command.step, "tail")
                self.orders.give(
                    orders.Apply(step=command.step, kind=command.kind, vector=command.vector)
                )
            case events.UndoStep():
                self.orders.give(orders.Undo(step=command.step))
            case events.BreakGeneration():
                self._break(command)
            case events.CloseGates():
                self.communicator.gate_close()
            case _:
                self._execute_switch(command)

    def _execute_switch(self, command: events.AnyCommand) -> None:
        match command:
            case events.PreparePhaseOne():
                self.phase_one = CutOverRun(self, command.plan)
                self.phase_one.prepare()
            case events.CutOver():
                self._cut_over(command.plan)
            case events.CommitGeneration():
                self._commit(command)
            case events.AbortGeneration():
                self._abort(command)
            case events.LeaveMain():
                self.reached("leaver_released", self.state.generation)
                self.orders.give(orders.Leave(reason=command.reason))
                self.engine.call_later(
                    self.config.leave_grace_s, lambda: self.end_process(exits.COMPLETED)
                )
            case events.FinishMain():
                self.orders.give(orders.Finish())
            case events.LearnCosts():
                self.host.learn(command.costs)
            case events.DecideRecording():
                self.host.decide_recording(command.order)
            case events.StopWorker():
                self._stop(command)

    def _enter_main(self, command: events.EnterMain) -> None:
        self._ordered += 1
        if command.is_loopback:
            self.communicator.start_loopback(command.rank, command.world_size)
        self.orders.give(
            orders.RunMain(
                rank=command.rank,
                world_size=command.world_size,
                is_loopback=command.is_loopback,
                attempts=command.attempts,
                version=command.version,
                number=self._ordered,
                rehearsals=command.rehearsals,
                restore=None if command.is_loopback else self.host.restore,
            )
        )

    def _collective_entered(self, call: str) -> None:
        self.page.write_collective(call)
        stepper = self.stepper
        if stepper is not None:
            stepper.tail.called()
        if not self.step_faults.is_armed or stepper is None:
            return
        if stepper.phase == "running":
            self._fault_at(stepper.version.step, str(self.watch.calls))
        elif stepper.phase == "tail":
            behind = self.watch.calls - self.watch.calls_at_gate
            self._fault_at(stepper.version.step - 1, f"tail{behind}")

    def _fault_at(self, step: int, place: str) -> None:
        stepper = self.stepper
        if self.step_faults.is_armed and stepper is not None and not stepper.is_shadow:
            self.step_faults.reached(stepper.rank, step, place, self.state.generation)

    def _reset_one(self) -> None:
        def cut() -> None:
            self.communicator.cut_channel()

        self.engine.submit(cut)

    def _mark_flag(self, command: events.ContributeGate) -> None:
        if command.flags[0]:
            self.reached("flag_set", command.flags[0])
        self._fault_at(command.step, "gate")

    def _invented(self) -> None:
        """In front of values that nobody has sent: what was there before must be known."""
        stepper = self.stepper
        if stepper is None:
            return
        if not self.engine.on_thread():
            stepper.tail.invented()
        elif stepper.tail.strike():
            self.dispatch(events.TailStruck(step=stepper.version.step - 1))

    def _break(self, command: events.BreakGeneration) -> None:
        self.mark("detected")
        self.reached("detected", command.generation)
        self.host.broken()
        self.communicator.break_generation(
            "; ".join(f"{edge.peer}: {edge.reason}" for edge in command.edges) or "told by a peer"
        )
        self.reached("poisoned", command.generation)

    def _cut_over(self, plan: Plan) -> None:
        run = self.phase_one
        if run is None or run.plan.number != plan.number:
            run = CutOverRun(self, plan)
        self.phase_one = None
        self.cut = run
        run.start(plan)

    def _commit(self, command: events.CommitGeneration) -> None:
        run, self.cut = self.cut, None
        if run is None:
            return
        self.mark("committed")
        self.host.committed(run.plan)
        if run.is_member:
            self.communicator.commit(command.number)
            if not run.plan.is_fresh_start:
                # The main thread stands at a boundary: what was invented before is undone or
                # dropped. A break from now on taints anew.
                self.communicator.clear_taint()
            self.membership = run.plan.membership
            self.store.drop_above(command.target_step)
            rank = run.rank
            assert rank is not None
            self.increments.committed(run.plan.membership, rank, command.target_step)
            redirect(self.request.spec.log_directory, command.number, rank)
            # A roll-back takes passed gates back; a stale one would look like progress.
            self.page.write(generation=command.number, gate=command.target_step - 1)
        self.exchange.close_serving(command.number)

    def _abort(self, command: events.AbortGeneration) -> None:
        for run in (self.cut, self.phase_one):
            if run is not None and run.plan.number == command.number:
                run.cancel()
        self.cut = None
        self.phase_one = None
        self.exchange.abort(command.number)
        self.communicator.abort(command.number)

    def _stop(self, command: events.StopWorker) -> None:
        if command.reason and command.code:
            self.tell_finding("stopped", command.reason)
        self.orders.give(orders.Halt(code=command.code, reason=command.reason))
        self.communicator.close()
        # The main thread may be deep in user code: the process ends whether it comes back or not.
        self.engine.call_later(self.config.closing_grace_s, lambda: self.end_process(command.code))

    def end_process(self, code: int) -> None:
        """Last messages out, then end; no exit handler of the script runs."""
        self.link.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # ------------------------------------------------------------------ for all parts

    def tell_finding(self, kind: str, text: str) -> None:
        """A finding about this rank."""
        rank = self.stepper.rank if self.stepper is not None else -1
        self.link.tell(Finding(incarnation=self.incarnation, rank=rank, kind=kind, text=text))

    def mark(self, name: str) -> None:
        """For the incident report; on this process's monotonic clock."""
        self._marks.append(Mark(name=name, at_ns=time.monotonic_ns()))
        del self._marks[:-64]

    def take_marks(self) -> tuple[Mark, ...]:
        """Marks since the last call."""
        taken, self._marks = tuple(self._marks), []
        return taken

    def reached(self, phase: str, generation: int) -> None:
        """A named phase of a switchover; a drill may strike here."""
        reached(phase, who=self.incarnation, generation=generation)
