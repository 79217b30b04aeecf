"""Main-thread side of the step protocol: boundary, gate, undo, tail, and taking another role.

Decides nothing about the job: it captures state, reports where the main thread is, and does what
the lifecycle orders. Version k is what a rank has when it enters step k (protocol.md section B).

Invariants: I1 (a tainted attempt never asks for the gate).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from trainmover.errors import ScriptError, TrackError
from trainmover.protocol import exits, flags
from trainmover.protocol.messages import Plan, Version
from trainmover.state.inventory import Inventory
from trainmover.state.rng import capture_rng, restore_rng
from trainmover.state.undo import UndoSet
from trainmover.worker import orders
from trainmover.worker.at_boundary import boundary_reached
from trainmover.worker.batches import Batches
from trainmover.worker.buckets import Buckets
from trainmover.worker.early_findings import EarlyFindings
from trainmover.worker.events import GateRequested, RunOutFailed
from trainmover.worker.finish import FinishGate
from trainmover.worker.host import Host
from trainmover.worker.increments import Increments
from trainmover.worker.logbook import Logbook
from trainmover.worker.metrics import Metrics
from trainmover.worker.own_leaves import OwnLeaves
from trainmover.worker.personal import Personal
from trainmover.worker.reading import Reading
from trainmover.worker.restore_check import RestoreCheck
from trainmover.worker.roles import Roles
from trainmover.worker.self_check import SelfCheck
from trainmover.worker.sequence import SequenceWatch
from trainmover.worker.shadow import ShadowAttempts
from trainmover.worker.snapshots import Snapshots
from trainmover.worker.tail import Tail
from trainmover.worker.unwinding import Halted, Left, Reentered, StepUndone

if TYPE_CHECKING:
    from trainmover.worker.first_iterations import FirstIterations


class Stepper:
    """State of one entry of `main` on the main thread."""

    def __init__(self, host: Host, entry: orders.RunMain, watch: SequenceWatch) -> None:
        self.host = host
        self.entry = entry
        self.watch = watch
        self.rank = entry.rank
        self.world_size = entry.world_size
        self.is_shadow = entry.is_loopback
        self.version = Version(step=0, lineage=0)
        self.step_index = 0
        self.parts_done: tuple[str, ...] = ()
        self.part_names: tuple[str, ...] | None = None
        self.attempts = 0
        self.phase = "building"
        self.inventory = Inventory({})
        self.batches: list[Batches] = []
        self.undo_set: UndoSet | None = None
        self.own = OwnLeaves(self)
        self.increments = Increments(self)
        self.gate_personal: Personal | None = None
        self.boundary_personal: Personal | None = None
        self.logbook = Logbook(self)
        self.roles = Roles(self)
        self.tail = Tail(self)
        self.finishing = FinishGate(self)
        self.snapshots = Snapshots(self)
        self.restored = RestoreCheck(self)
        self.broken_state = ""
        self.bulk_digest = 0
        self.shared_digest = 0
        self.rng_for_part: bytes | None = None
        self.settling: Plan | None = None
        self.built_s = time.monotonic()
        self.has_tracked = False
        limit = host.config.settle_attempts_max
        self.shadow = ShadowAttempts(entry.attempts, entry.version, limit)
        self.part = ""
        self.has_rolled_back = False
        """An earlier version was loaded at the last boundary: the loop has to hand out its step."""
        self.entered = -1
        """Version whose step the script has entered (`with step:` or `step.run`)."""
        self.metrics = Metrics(self)
        watch.is_undoable = lambda: (
            not self.is_shadow and (self.phase == "running" or self.tail.can_be_left)
        )
        watch.on_early = EarlyFindings(self).watch
        self.check: SelfCheck | None = None
        if host.config.is_check:
            self.check = SelfCheck(self, self.logbook.finding)
        self.top_batches: tuple[bytes, ...] = ()
        self.reading = Reading(self)
        self.buckets = Buckets(self)
        self.first: FirstIterations | None = None

    # ------------------------------------------------------------------ tracking

    def track(self, objects: Mapping[str, object], ignore: tuple[object, ...]) -> None:
        """Take over what `job.track` was given; raises TrackError with the name of the object."""
        if self.has_tracked:
            raise TrackError("track() was called twice; call it once with everything")
        if self.phase != "building":
            raise TrackError("track() was called after the first step; call it before job.steps()")
        self.inventory = Inventory(objects, ignore)
        self.has_tracked = True
        from trainmover.worker.optimizer_hooks import install

        for optimizer in self.inventory.optimizers:
            install(optimizer, self)

    # ------------------------------------------------------------------ boundary

    def boundary(self) -> None:
        """Stand at the top of the current version until the lifecycle lets it run.

        Raises: Left, Reentered, Halted.
        """
        if self.check is not None and self.check.is_rehearsing and self.phase == "boundary":
            self.rearm()
            self._begin_attempt()
            return
        if self.settling is not None:
            plan, self.settling = self.settling, None
            self.rearm()
            if self.roles.settle(plan):
                self._begin_attempt()
                return
        else:
            self.tail.end()
            if self.tail.is_void:
                self.tail.go_back()
            else:
                self._restore()
                self.rearm()
                self.increments.at_boundary()
                self.snapshots.take_if_asked()
            self._post_boundary()
        self._park()
        self._begin_attempt()

    def _restore(self) -> None:
        """First boundary of an entry that begins with a checkpoint: stand at its version."""
        begin = self.entry.restore
        if begin is not None and self.phase == "building":
            from trainmover.worker.restoring import restore

            self.phase = "boundary"
            restore(self, begin)

    def _post_boundary(self) -> None:
        self.host.post(boundary_reached(self))

    def rearm(self) -> None:
        """Capture what an undo puts back and what a joiner needs as our own leaves."""
        self.phase = "boundary"
        if self.undo_set is None:
            self.undo_set = UndoSet(self.inventory, self.batches)
        self.undo_set = self.tail.copy.hand_over(self.undo_set)
        rng, smalls = capture_rng(), self.own.smalls()
        self.undo_set.capture(rng, smalls)
        if self._is_repeated:
            # In the callable form the loop body stands behind what it has read. Whoever begins this
            # step anew, a joiner or this rank once back from behind its gate, begins at the top.
            return
        if not self.parts_done:
            self.top_batches = self.own.positions()
            self.reading.begin()
        here = self.own.capture(self.version, smalls, rng, is_final=True)
        at_gate = self.gate_personal
        if at_gate is not None and not self.is_shadow:
            has_changed = self.own.has_changed(at_gate, here)
            if has_changed:
                self.own.note_tail_mutation(at_gate, here)
            if has_changed or here.is_whole or not at_gate.is_final:
                self.host.send_personal(here)
        if at_gate is None and self.attempts == 0 and not self.is_shadow:
            # A loss before the first gate must not cost a fresh start.
            self.host.send_personal(here)
        self.gate_personal = None
        self.boundary_personal = here

    @property
    def _is_repeated(self) -> bool:
        """Whether an attempt was undone since this boundary was captured first."""
        top = self.boundary_personal
        if top is None or self.gate_personal is not None or self.attempts == 0:
            return False
        here = (self.version, self.step_index, self.parts_done)
        return here == (top.version, top.step_index, top.parts_done)

    def _begin_attempt(self) -> None:
        self.attempts += 1
        self.phase = "running"
        if self.check is not None:
            self.check.begin_attempt()
        self.broken_state = ""
        self.logbook.begin()
        self.tail.digest = None
        self.watch.begin()
        self.host.note("running", self.version.step)

    def begin_shadow(self) -> None:
        """A loop-back iteration starts."""
        self.phase = "running"
        self.shadow.begin()
        self.watch.begin()

    def park_standby(self) -> None:
        """Built and put back: tell it (unless a plan is waiting already) and wait for a rank."""
        following = None if self.host.walk is None else self.host.walk.finish()
        if following is not None:
            raise Reentered(following)
        self.rearm()
        if not self.entry.is_adoption:
            self._post_boundary()
        self._park()
        self._begin_attempt()

    def _park(self) -> None:
        """Carry out orders at a boundary until one of them lets the step run."""
        step = self.version.step
        while True:
            order = self.host.orders.take(lambda: self.host.note("boundary", step))
            match order:
                case orders.Go():
                    if order.step != self.version.step:
                        raise Halted(
                            exits.PROTOCOL_FAILED,
                            f"ordered to run step {order.step} at version {self.version}",
                        )
                    return
                case orders.Adopt():
                    self.roles.adopt(order.plan)
                case orders.Receive():
                    self.roles.receive(order.plan)
                case orders.Settle():
                    if self.roles.settle(order.plan):
                        return
                case orders.Finish():
                    raise Halted(exits.STOPPED_BY_OPERATOR, "stopped at a boundary")
                case _:
                    self.unwind(order)

    def unwind(self, order: orders.Order) -> None:
        """An order that ends this entry of `main`. Raises: Left, Reentered, Halted."""
        match order:
            case orders.RunMain():
                raise Reentered(order)
            case orders.Leave():
                raise Left(order.reason)
            case orders.Halt():
                raise Halted(order.code, order.reason)
            case _:
                raise Halted(
                    exits.PROTOCOL_FAILED,
                    f"{type(order).__name__} was ordered in phase {self.phase}",
                )

    # ------------------------------------------------------------------ gate and undo

    def gate(self, *, has_update: bool, part: str = "") -> None:
        """Agree with all ranks that this step's gradients are complete everywhere.

        Collective: yes, once per version. Blocks: until the gate has passed or is undone.
        Raises: StepUndone, Reentered, Left, Halted.
        """
        if self.phase != "running":
            return
        if self.is_shadow:
            self.phase = "tail"
            return
        self.metrics.ride()
        if self.host.is_tainted or self.settling is not None:
            raise StepUndone
        if self.check is not None and self.check.at_gate():
            raise StepUndone
        self.phase = "gate"
        self.host.note("gate", self.version.step)
        before = (self.step_index, self.parts_done)
        self.step_index, self.parts_done = self.own.next_place(part)
        smalls = self.own.smalls()
        following = Version(step=self.version.step + 1, lineage=self.host.generation)
        is_final = not self.own.is_tail_mutating
        try:
            personal = self.own.capture(following, smalls, capture_rng(), is_final=is_final)
        finally:
            self.step_index, self.parts_done = before
        self.increments.record(personal.version, has_update=has_update)
        self.host.send_personal(personal)
        vector = flags.encode(
            flags.GateFlags(
                has_update=has_update,
                has_no_update=not has_update,
                is_non_finite=self.snapshots.is_loss_doubted,
                snapshot=self.snapshots.wanted(),
                has_tail_collectives=self.tail.wants_copy,
                is_copy_refused=self.tail.refuses_copy,
                names_digest=self.inventory.names_digest,
                digests=self.own.small_digests(smalls),
            )
        )
        self.host.post(GateRequested(step=self.version.step, kind=flags.STEP, flags=vector))
        self._passed(self._await_gate(), personal, part)

    def _await_gate(self) -> flags.GateResult:
        while True:
            order = self.host.orders.take()
            match order:
                case orders.Apply():
                    return flags.GateResult(vector=order.vector)
                case orders.Undo():
                    raise StepUndone
                case orders.Settle() if order.plan.is_fresh_start:
                    self.host.settled(order.plan)
                case _:
                    self.unwind(order)

    def _passed(self, result: flags.GateResult, personal: Personal, part: str) -> None:
        self.host.note("tail", self.version.step)
        if not result.are_names_equal:
            raise TrackError(
                "track() was given other names on another rank; every rank must track the same "
                f"objects. Here: {', '.join(self.inventory.small_names) or 'none'}"
            )
        if result.is_update_disputed:
            raise ScriptError(
                f"step {self.step_index}: some ranks step their optimizer and others do not; "
                "agree on it (reduce the condition over all ranks) before optimizer.step()"
            )
        self.tail.passed(result)
        equal = result.are_equal()
        names = self.inventory.small_names
        self.own.names = frozenset(n for n, same in zip(names, equal, strict=True) if not same)
        self.gate_personal = personal
        self.snapshots.ask(result.snapshot, is_suspect=bool(result.vector[flags.NON_FINITE]))
        self.version = Version(step=self.version.step + 1, lineage=self.host.generation)
        self.step_index, self.parts_done = self.own.next_place(part)
        self.phase = "tail"

    def undo(self) -> None:
        """Put back everything the attempt has changed; back at the boundary of the same version."""
        assert self.undo_set is not None
        if self.phase == "tail":
            self.tail.undo_gate()
        try:
            self.undo_set.restore()
        except ScriptError as error:
            # What can't be put back can be fetched: another process takes this rank in place.
            self.give_up(str(error))
        self.host.clear_taint()
        self.watch.cancel()
        if self.first is not None:
            self.first.undone()
        self.logbook.undo()
        self.host.undone()
        self.phase = "boundary"

    def give_up(self, reason: str) -> NoReturn:
        """This attempt can't be ended or undone here: the process ends, its rank goes on."""
        self.logbook.finding("run-out", f"this process is replaced in place: {reason}")
        self.host.post(RunOutFailed(reason=reason))
        while True:
            order = self.host.orders.take()
            if isinstance(order, orders.Halt):
                raise Halted(order.code, order.reason)
            if isinstance(order, orders.Settle) and order.plan.is_fresh_start:
                self.host.settled(order.plan)

    def restart_attempt(self) -> None:
        """Callable form: undo also goes to here, behind what the loop body did before."""
        if self.undo_set is not None:  # a standby's loop-back is never undone
            self.undo_set.capture()

    def resume_part(self) -> None:
        """Joiner inside a step of several parts: random state as in front of the next one."""
        if self.rng_for_part is not None:
            restore_rng(self.rng_for_part)
            self.rng_for_part = None

    def end_of_body(self, parts: tuple[str, ...]) -> None:
        """The loop body has ended: the parts a step has are known from now on."""
        if parts and self.part_names is None:
            self.part_names = parts
        if self.parts_done:
            if self.parts_done != self.part_names:
                raise ScriptError(
                    f"step {self.step_index}: parts {', '.join(parts)} were run, but the first "
                    f"step had {', '.join(self.part_names or ())}; each step needs the same parts"
                )
            self.step_index, self.parts_done = self.step_index + 1, ()
