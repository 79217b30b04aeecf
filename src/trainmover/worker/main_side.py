"""The process as the main thread sees it: implements `Host` for a worker under an agent.

Called on the main thread. What it hands to the I/O thread goes through the engine's queue; what it
reads there are single values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainmover.communicator.settings import Mode
from trainmover.protocol.messages import CostsMeasured, Edge, KeepRecording, Message, Plan
from trainmover.topology.membership import backups_of
from trainmover.worker import orders
from trainmover.worker.cut_over import CutOverRun
from trainmover.worker.events import Local
from trainmover.worker.first_iterations import FirstIterations
from trainmover.worker.increment_side import IncrementSide
from trainmover.worker.personal import PERSONAL, Personal, encode
from trainmover.worker.snapshot_side import SnapshotSide
from trainmover.worker.walk import Walk

if TYPE_CHECKING:
    from trainmover.edges.errand import Errand
    from trainmover.state.inventory import Inventory
    from trainmover.worker.restoring import Loading
    from trainmover.worker.runtime import Runtime

END_LIMIT_S = 5.0
"""Longest wait for the I/O thread to end the process."""


class MainSide:
    """Host of one worker."""

    is_managed = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.orders = runtime.orders
        self.config = runtime.config
        self.run_id = runtime.run_id
        self.incarnation = runtime.incarnation
        self.pending_entry: orders.RunMain | None = None
        self.restore: orders.Restore | None = None
        """What the next live entry of `main` begins with."""
        self._loading: Loading | None = None
        self.snapshots: SnapshotSide | None = SnapshotSide(
            runtime.request.machine,
            runtime.request.spec,
            runtime.request.secret,
            runtime.config.transfer_timeout_s,
        )
        self.increments: IncrementSide | None = runtime.increments
        self.walk = Walk(runtime)
        self.first: FirstIterations | None = None

    def post(self, event: Local) -> None:
        """To the lifecycle, on the I/O thread."""
        self._runtime.post_from_main(event)

    @property
    def generation(self) -> int:
        """Committed generation; 0 on a standby."""
        return self._runtime.state.generation

    @property
    def is_tainted(self) -> bool:
        """Whether a collective has returned an invented value."""
        return self._runtime.communicator.tainted

    @property
    def is_running_out(self) -> bool:
        """Whether collectives return at once."""
        return self._runtime.communicator.mode is Mode.RUN_OUT

    def clear_taint(self) -> None:
        """After an undo."""
        self._runtime.communicator.clear_taint()

    def guard_waits(self, guard: Callable[[], None] | None) -> None:
        """Of the script's own collectives."""
        self._runtime.communicator.after_wait = guard

    def committed(self, plan: Plan) -> None:
        """On the I/O thread: `plan` is committed; a fresh start may begin with a checkpoint."""
        self.restore = None
        if plan.is_fresh_start and plan.restore:
            self.restore = orders.Restore(plan.restore, plan.target, plan.disks)

    def loads(self, loading: Loading | None) -> None:
        """Main thread: this load, or none, is under way."""
        self._loading = loading
        if loading is not None and self._runtime.state.is_broken:
            loading.end()

    def broken(self) -> None:
        """On the I/O thread: the generation is broken; nobody waits for what it loads."""
        loading = self._loading
        if loading is not None:
            loading.end()

    def link_up(self) -> None:
        """On the I/O thread: an agent that has just come up must know of all snapshots."""
        if self.snapshots is not None:
            for taken in self.snapshots.slots.told():
                self.tell(taken)

    def tell(self, message: Message) -> None:
        """To the controller's log; not for the decider."""
        self._runtime.link.tell(message)

    def send_personal(self, personal: Personal) -> None:
        """To both backups of the current generation."""
        membership = self._runtime.membership
        if membership is None:
            return
        payload = encode(personal)
        for rank in backups_of(personal.owner_rank, membership):
            self._runtime.communicator.send_control(rank, PERSONAL, personal.version.step, payload)

    def fetch_state(self, plan: Plan, rank: int, receive: Callable[..., int]) -> int:
        """Joiner, main thread."""
        return self._runtime.exchange.fetch_state(plan, rank, receive)

    def peek_personal(self, plan: Plan, rank: int) -> Personal | None:
        """Joiner: a hint where the loader will have to stand."""
        return self._runtime.exchange.peek_personal(plan, rank)

    def fetch_personal(self, plan: Plan, rank: int) -> Personal:
        """Joiner, main thread."""
        return self._runtime.exchange.fetch_personal(plan, rank)

    def fetch_shared(self, plan: Plan, rank: int) -> tuple[tuple[str, bytes], ...]:
        """Joiner, main thread."""
        return self._runtime.exchange.fetch_shared(plan, rank)

    def errand(self, plan: Plan) -> Errand:
        """Joiner, main thread."""
        return self._runtime.exchange.errand(plan)

    def is_void(self, plan: Plan) -> bool:
        """Joiner, main thread."""
        return self._runtime.exchange.is_void(plan)

    def adopted(self, plan: Plan, how: str) -> None:
        """Joiner, main thread: plays its rank."""
        self._submit(plan, lambda run: run.adopted(how))

    def received(self, plan: Plan, bytes_received: int) -> None:
        """Joiner, main thread: has its state."""
        self._submit(plan, lambda run: run.received(bytes_received))

    def settled(self, plan: Plan) -> None:
        """Stayer or leaver, main thread: stands at the target."""
        self._submit(plan, lambda run: run.settled())

    def failed(self, plan: Plan, edge: Edge) -> None:
        """Joiner, main thread: its state can't be had from there."""
        self._submit(plan, lambda run: run.failed(edge))

    def _submit(self, plan: Plan, act: Callable[[CutOverRun], None]) -> None:
        self._runtime.engine.submit(lambda: self._in_run(plan, act))

    def _in_run(self, plan: Plan, act: Callable[[CutOverRun], None]) -> None:
        for run in (self._runtime.cut, self._runtime.phase_one):
            if run is not None and run.plan.number == plan.number:
                act(run)
                return

    def mark(self, name: str) -> None:
        """For the incident report."""
        self._runtime.mark(name)

    def note(self, phase: str, step: int, collective: str = "") -> None:
        """Progress page."""
        attempts = self._runtime.stepper.attempts if self._runtime.stepper is not None else 0
        self._runtime.page.write(step=step, phase=phase, attempts=attempts)
        if collective:
            self._runtime.page.write_collective(collective)

    def undone(self) -> None:
        """An interrupted attempt has been undone."""
        self._runtime.mark("undone")
        self._runtime.reached("run_out", self.generation)

    def begin_entry(self, order: orders.RunMain) -> None:
        """`main` is about to be entered as `order` says: nothing of the last entry is kept."""
        first, self.first = self.first, None
        if first is not None:
            first.close()
        self._runtime.communicator.interpose(None)
        if order.is_loopback:
            self.walk.begin(order)

    def watch_first(self, inventory: Inventory, rank: int) -> FirstIterations | None:
        """Record the first iterations of a member that has entered `main` as one."""
        if self._runtime.rehearsal.answers == "loopback":
            return None
        self.first = FirstIterations(self._runtime, inventory, rank)
        return self.first

    def learn(self, costs: CostsMeasured) -> None:
        """On the I/O thread: what saves cost and how often the job fails."""
        if self.snapshots is not None:
            self.snapshots.learn(costs)

    def decide_recording(self, order: KeepRecording) -> None:
        """On the I/O thread: who keeps the recording of this rank's class."""
        if self.first is not None:
            self.first.decide(order)

    def set_rank(self, rank: int) -> None:
        """Environment and process group show `rank` from now on."""
        os.environ["RANK"] = str(rank)
        if self._runtime.communicator.generation == 0:
            self._runtime.communicator.start_loopback(rank, self._runtime.communicator.world_size)

    def note_rank_read(self) -> None:
        """`job.rank` was read."""
        self._runtime.reads.note()

    def end_build(self) -> None:
        """`main` has reached its loop."""
        self._runtime.reads.end()

    def rank_readers(self) -> Sequence[str]:
        """Where the script has read the rank while building."""
        return self._runtime.reads.places

    def end_now(self, code: int) -> None:
        """Last messages out, then end, from wherever the main thread is."""
        self._runtime.engine.submit(lambda: self._runtime.end_process(code))
        time.sleep(END_LIMIT_S)
        os._exit(code)

    def enter_again(self, order: orders.RunMain) -> None:
        """`main` is on its way out and can't be unwound: enter it again afterwards."""
        self.pending_entry = order
