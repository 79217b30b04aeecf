"""Main-thread side of the step protocol: boundary, gate, undo, tail, and taking another role.

Decides nothing about the job: it captures state, reports where the main thread is, and does what
the lifecycle orders. Version k is what a rank has when it enters step k (protocol.md section B).

Invariants: I1 (a tainted attempt never asks for the gate), I9 (a joiner's parts are of one version).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainmover.errors import ScriptError, StateMismatch, TrackError, TransportError
from trainmover.protocol import exits, flags
from trainmover.protocol.messages import Edge, Finding, Plan, StepLogged, Version
from trainmover.state.inventory import Inventory
from trainmover.state.rng import capture_rng, restore_rng
from trainmover.state.transfer import receive_state
from trainmover.state.undo import UndoSet
from trainmover.worker import orders
from trainmover.worker.batches import Batches
from trainmover.worker.events import BoundaryReached, GateRequested
from trainmover.worker.host import Host
from trainmover.worker.metrics import Metrics
from trainmover.worker.personal import Personal
from trainmover.worker.sequence import SequenceWatch
from trainmover.worker.unwinding import Halted, Left, Reentered, StepUndone

MASK = (1 << 63) - 1


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
        self.own_names: frozenset[str] | None = None
        self.is_tail_mutating = False
        self.gate_personal: Personal | None = None
        self.boundary_personal: Personal | None = None
        self.logged: dict[str, str] = {}
        self.logged_after: dict[str, str] = {}
        self.tail_digest: int | None = None
        self.broken_state = ""
        self.bulk_digest = 0
        self.shared_digest = 0
        self.rng_for_part: bytes | None = None
        self.settling: Plan | None = None
        self.built_s = time.monotonic()
        self.has_tracked = False
        self.part = ""
        self.metrics = Metrics(self)
        self.top_batches: tuple[bytes, ...] = ()

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

    # ------------------------------------------------------------------ personal state

    def _capture_personal(self, step: int, lineage: int, is_final: bool) -> Personal:
        names = self.inventory.small_names if self.own_names is None else sorted(self.own_names)
        return Personal(
            owner_rank=self.rank,
            version=Version(step=step, lineage=lineage),
            is_final=is_final,
            rng=capture_rng(),
            batches=self._positions(),
            smalls=tuple((name, self.inventory.small_bytes(name)) for name in names),
            logged=tuple(sorted(self.logged.items())),
            step_index=self.step_index,
            parts_done=self.parts_done,
            metrics=self.metrics.pending(at_gate=self.phase == "gate"),
        )

    def _positions(self) -> tuple[bytes, ...]:
        """Where the loaders stand; inside a step of several parts, where they stood at its top."""
        if self.parts_done:
            return self.top_batches
        return tuple(batches.position() for batches in self.batches)

    def _next_place(self, part: str) -> tuple[int, tuple[str, ...]]:
        """(step index, parts done) behind the gate of `part`."""
        if not part:
            return self.step_index + 1, ()
        done = (*self.parts_done, part)
        if self.part_names is not None and done == self.part_names:
            return self.step_index + 1, ()
        return self.step_index, done

    def _small_digests(self) -> tuple[int, ...]:
        return tuple(self.inventory.small_digest(name) for name in self.inventory.small_names)

    # ------------------------------------------------------------------ boundary

    def boundary(self) -> None:
        """Stand at the top of the current version until the lifecycle lets it run.

        Raises: Left, Reentered, Halted.
        """
        if self.settling is not None:
            plan, self.settling = self.settling, None
            self._rearm()
            if self._settle(plan):
                return
        else:
            self._end_tail()
            self._rearm()
            self._post_boundary()
        self._park()
        self._begin_attempt()

    def _post_boundary(self) -> None:
        readers = self.host.rank_readers()
        self.host.note("boundary", self.version.step)
        self.host.post(
            BoundaryReached(
                step=self.version.step,
                identity=self.inventory.identity,
                names_digest=self.inventory.names_digest,
                attempts=self.attempts,
                sequence_digest=self.watch.settled_digest,
                broken_state=self.broken_state,
                can_adopt_in_place=not readers,
                reason=readers[0] if readers else "",
                seconds=time.monotonic() - self.built_s,
            )
        )

    def _rearm(self) -> None:
        """Capture what an undo puts back and what a joiner needs as our own leaves."""
        self.phase = "boundary"
        if self.undo_set is None:
            self.undo_set = UndoSet(self.inventory, self.batches)
        self.undo_set.capture()
        if not self.parts_done:
            self.top_batches = self._positions()
        here = self._capture_personal(self.version.step, self.version.lineage, True)
        at_gate = self.gate_personal
        if at_gate is not None and not self.is_shadow and _differs(at_gate, here):
            self._note_tail_mutation(at_gate, here)
            self.host.send_personal(here)
        if at_gate is None and self.attempts == 0 and not self.is_shadow:
            # A loss before the first gate must not cost a fresh start.
            self.host.send_personal(here)
        self.gate_personal = None
        self.boundary_personal = here

    def _note_tail_mutation(self, at_gate: Personal, here: Personal) -> None:
        if self.is_tail_mutating:
            return
        self.is_tail_mutating = True
        what = "random generators" if at_gate.rng != here.rng else "loader position"
        if at_gate.rng == here.rng and at_gate.batches == here.batches:
            before = dict(at_gate.smalls)
            names = [name for name, data in here.smalls if before.get(name) != data]
            what = ", ".join(names) or "position in the step"
        self.finding(
            "tail-mutation",
            f"step {self.step_index - 1}: {what} changed after optimizer.step(); the copy that "
            "peers hold is renewed at each boundary, and a loss in between can't be repaired "
            "from it. Move it in front of optimizer.step() where you can.",
        )

    def _begin_attempt(self) -> None:
        self.attempts += 1
        self.phase = "running"
        self.broken_state = ""
        self.logged = {}
        self.logged_after = {}
        self.tail_digest = None
        self.watch.begin()
        self.host.note("running", self.version.step)

    def begin_shadow(self) -> None:
        """A loop-back iteration starts."""
        self.phase = "running"
        self.attempts += 1
        self.watch.begin()

    def park_standby(self) -> None:
        """Built and put back: tell it (unless a plan is waiting already) and wait for a rank."""
        self._rearm()
        if not self.entry.is_adoption:
            self._post_boundary()
        self._park()
        self._begin_attempt()

    def hand_made_state(self) -> dict[str, Any]:
        """Everything `_capture_personal` and the inventory hold, as plain dict of tensors."""
        return {
            "step": self.step_index,
            "bulk": {name: tensor.detach().clone() for name, tensor in self.inventory.bulk()},
            "small": {
                name: self.inventory.small_bytes(name) for name in self.inventory.small_names
            },
            "batches": [batches.position() for batches in self.batches],
            "rng": capture_rng(),
        }

    def load_hand_made(self, state: Mapping[str, Any]) -> None:
        """Inverse of `hand_made_state`, on a rank that has just built its objects."""
        self._load_bulk(state["bulk"])
        for name, data in state["small"].items():
            self.inventory.load_small(name, data)
        for batches, position in zip(self.batches, state["batches"], strict=True):
            batches.restore(position)
        restore_rng(state["rng"])
        self.step_index = int(state["step"])

    def _load_bulk(self, saved: Mapping[str, torch.Tensor]) -> None:
        live = dict(self.inventory.bulk())
        missing = sorted(set(live) ^ set(saved))
        if missing:
            raise StateMismatch(
                f"job.load_state_dict(): expected the names this job tracks; differing: {missing[0]}"
                f" and {len(missing) - 1} more"
            )
        with torch.no_grad():
            for name, tensor in live.items():
                if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
                    raise StateMismatch(
                        f"job.load_state_dict(): {name} is {tuple(tensor.shape)} {tensor.dtype}, "
                        f"saved was {tuple(saved[name].shape)} {saved[name].dtype}"
                    )
                tensor.copy_(saved[name])

    def _park(self) -> None:
        """Carry out orders at a boundary until one of them lets the step run."""
        while True:
            order = self.host.orders.take()
            match order:
                case orders.Go():
                    if order.step != self.version.step:
                        raise Halted(
                            exits.PROTOCOL_FAILED,
                            f"ordered to run step {order.step} at version {self.version}",
                        )
                    return
                case orders.Adopt():
                    self._adopt(order.plan)
                case orders.Receive():
                    self._receive(order.plan)
                case orders.Settle():
                    if self._settle(order.plan):
                        return
                case orders.Finish():
                    raise Halted(exits.STOPPED_BY_OPERATOR, "stopped at a boundary")
                case _:
                    self._unwind(order)

    def _unwind(self, order: orders.Order) -> None:
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
        if self.host.is_tainted:
            raise StepUndone
        self.phase = "gate"
        self.host.note("gate", self.version.step)
        before = (self.step_index, self.parts_done)
        self.step_index, self.parts_done = self._next_place(part)
        try:
            personal = self._capture_personal(
                self.version.step + 1, self.host.generation, not self.is_tail_mutating
            )
        finally:
            self.step_index, self.parts_done = before
        self.host.send_personal(personal)
        vector = flags.encode(
            flags.GateFlags(
                has_update=has_update,
                has_no_update=not has_update,
                names_digest=self.inventory.names_digest,
                digests=self._small_digests(),
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
                case _:
                    self._unwind(order)

    def _passed(self, result: flags.GateResult, personal: Personal, part: str) -> None:
        self.phase = "tail"
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
        equal = result.are_equal()
        names = self.inventory.small_names
        self.own_names = frozenset(n for n, same in zip(names, equal, strict=True) if not same)
        self.gate_personal = personal
        self.version = Version(step=self.version.step + 1, lineage=self.host.generation)
        self.step_index, self.parts_done = self._next_place(part)

    def undo(self) -> None:
        """Put back everything the attempt has changed; back at the boundary of the same version."""
        assert self.undo_set is not None
        self.undo_set.restore()
        self.host.clear_taint()
        self.watch.cancel()
        self.host.mark("undone")
        self.phase = "boundary"

    def restart_attempt(self) -> None:
        """Callable form: undo also goes to here, behind what the loop body did before."""
        assert self.undo_set is not None
        self.undo_set.capture()

    def resume_part(self) -> None:
        """Joiner inside a step of several parts: random state as it was in front of the next one."""
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
                    f"step {self.step_index}: parts {', '.join(parts)} were run, but the first step "
                    f"had {', '.join(self.part_names or ())}; every step needs the same parts"
                )
            self.step_index, self.parts_done = self.step_index + 1, ()

    def finish(self) -> bool:
        """The gate behind the loop, then wait until every rank has finished (protocol.md W6, C6).

        Returns False when the gate did not pass and must be entered again from the boundary.
        """
        try:
            while True:
                order = self._finish_gate()
                if isinstance(order, orders.Finish):
                    self.phase = "finished"
                    return True
                # An incident came between and was repaired: the gate is entered again.
                self.phase = "running"
        except StepUndone:
            self.undo()
            return False

    def _finish_gate(self) -> orders.Order:
        """Enter the finish gate; Finish when the job is complete, Go when it must be repeated."""
        if self.host.is_tainted:
            raise StepUndone
        self.phase = "gate"
        self.host.note("finish", self.version.step)
        vector = flags.encode(
            flags.GateFlags(
                has_update=False,
                names_digest=self.inventory.names_digest,
                digests=self._small_digests(),
            )
        )
        self.host.post(GateRequested(step=self.version.step, kind=flags.FINISH, flags=vector))
        while True:
            order = self.host.orders.take()
            match order:
                case orders.Finish() | orders.Go():
                    return order
                case orders.Undo():
                    raise StepUndone
                case orders.Settle():
                    self._settle(order.plan)
                case _:
                    self._unwind(order)

    # ------------------------------------------------------------------ tail

    def before_invented(self) -> None:
        """Take the digest that shows whether a dropped value has touched state (protocol.md B2)."""
        if self.phase == "tail" and self.tail_digest is None:
            self.tail_digest = self._whole_digest()

    def _whole_digest(self) -> int:
        value = self.inventory.bulk_digest()
        for digest in self._small_digests():
            value = (value * 1_000_003 + digest) & MASK
        return value

    def _end_tail(self) -> None:
        if self.phase != "tail":
            return
        self.watch.end()
        if not self.host.is_tainted or self.is_shadow:
            return
        after = self._whole_digest()
        if self.tail_digest is None or after != self.tail_digest:
            self.broken_state = (
                f"a collective after optimizer.step() of step {self.step_index - 1} was cut short "
                "and state has changed since"
            )
        else:
            self.finding(
                "dropped",
                f"step {self.step_index - 1}: a collective after optimizer.step() was cut short by "
                f"a loss ({self.watch.last_invented}); its value is dropped, state is untouched. "
                'Use step.log(..., reduce="mean") or put it in front of optimizer.step().',
            )
        self.host.clear_taint()

    # ------------------------------------------------------------------ logs

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of the current step; told once when it is committed."""
        target = self.logged if self.phase == "running" else self.logged_after
        for name, value in values.items():
            target[name] = _as_text(value)

    def tell_log(self, step_index: int) -> None:
        """Called by the step when it is committed and its block has ended."""
        if self.is_shadow or self.rank != 0:
            return
        values = dict(self.logged)
        if not self.host.is_tainted:
            values.update(self.logged_after)
        if values:
            self._tell_logged(step_index, values)

    def _tell_logged(self, step_index: int, values: Mapping[str, str]) -> None:
        self.host.tell(
            StepLogged(
                incarnation=self.host.incarnation,
                step=step_index,
                lineage=self.version.lineage,
                values=tuple(sorted(values.items())),
            )
        )

    def tell_reduced(self, by_step: Mapping[int, Mapping[str, str]]) -> None:
        """Reduced values of earlier steps, by the primary."""
        if self.is_shadow or self.rank != 0:
            return
        for step_index, values in sorted(by_step.items()):
            self._tell_logged(step_index, values)

    def finding(self, kind: str, text: str) -> None:
        """Tell the user something, once per kind and text (the supervisor removes repeats)."""
        self.host.tell(
            Finding(incarnation=self.host.incarnation, rank=self.rank, kind=kind, text=text)
        )

    # ------------------------------------------------------------------ switchover, on this thread

    def _settle(self, plan: Plan) -> bool:
        """Stayer or leaver at the target. True: run one more attempt out first (see Plan.attempts)."""
        if self.attempts < plan.attempts and not self.watch.is_settled and self.host.is_running_out:
            self.settling = plan
            return True
        if plan.kind == "unplanned" and plan.joiners and self.metrics.drop_late():
            self.finding(
                "dropped",
                f"step {self.step_index - 1}: reduced values logged behind optimizer.step() are "
                "dropped after a loss; log them in front of it to keep them",
            )
        self.bulk_digest = self.inventory.bulk_digest()
        self.shared_digest = self._shared_digest()
        self.host.settled(plan)
        return False

    def _shared_digest(self) -> int:
        own = set(self.inventory.small_names) if self.own_names is None else self.own_names
        value = 0
        for name in self.inventory.small_names:
            if name not in own:
                value = (value * 1_000_003 + self.inventory.small_digest(name)) & MASK
        return value

    def _adopt(self, plan: Plan) -> None:
        rank = plan.membership.rank_of(self.host.incarnation)
        if rank is None:
            raise Halted(exits.PROTOCOL_FAILED, f"plan {plan.number} does not name this worker")
        is_too_warm = plan.kind == "unplanned" and plan.attempts < self.attempts
        must_repeat = rank != self.rank and not self._can_play(rank)
        if (is_too_warm or must_repeat) and not (self.entry.is_adoption and rank == self.rank):
            # A rank can't be played by objects built for another; and stayers whose first steps
            # are not behind them have other DDP buckets than a standby that ran several.
            self.host.orders.give(orders.Adopt(plan))
            raise Reentered(
                orders.RunMain(
                    rank=rank,
                    world_size=self.world_size,
                    is_loopback=True,
                    attempts=plan.attempts if is_too_warm else -1,
                    is_adoption=True,
                )
            )
        how = "as_built" if rank == self.entry.rank else "in_place"
        if self.entry.is_adoption:
            how = "reentered"
        for batches in self.batches:
            batches.set_rank(rank)
        self.rank = rank
        self.host.set_rank(rank)
        self.host.adopted(plan, how)

    def _can_play(self, rank: int) -> bool:
        if self.host.rank_readers():
            return False
        return all(batches.set_rank(rank) for batches in self.batches)

    def _receive(self, plan: Plan) -> None:
        def receive(stream: Any, progress: Callable[[float], None]) -> int:
            return receive_state(stream, self.inventory, progress=progress).bytes

        source = next(source for source in plan.sources if source.rank == self.rank)
        peer = source.bulk_from
        try:
            amount = self.host.fetch_state(plan, self.rank, receive)
            peer = source.own_from
            personal = self.host.fetch_personal(plan, self.rank)
        except (TransportError, StateMismatch) as error:
            # Half-loaded state does no harm: the next plan loads all of it again.
            self.host.failed(plan, Edge(peer=peer, reason=str(error)))
            return
        if personal.version.step != plan.target.step:
            text = f"personal state at version {plan.target.step}, got {personal.version.step}"
            self.host.failed(plan, Edge(peer=peer, reason=f"expected {text}"))
            return
        self._put_personal(personal, plan)
        self.host.received(plan, amount)

    def _put_personal(self, personal: Personal, plan: Plan) -> None:
        names = frozenset(name for name, _ in personal.smalls)
        self.own_names = names if plan.target.step > 0 else None
        for name, data in personal.smalls:
            self.inventory.load_small(name, data)
        for batches, position in zip(self.batches, personal.batches, strict=True):
            batches.restore(position)
        restore_rng(personal.rng)
        self.metrics.put(personal.metrics)
        self.version = plan.target
        self.step_index = personal.step_index
        self.parts_done = personal.parts_done
        self.rng_for_part = personal.rng if personal.parts_done else None
        self.is_shadow = False
        self.gate_personal = None
        if self.rank == 0 and personal.logged:
            # The lost primary may have passed the gate and died before telling its log line.
            self._tell_logged(self.step_index - 1, dict(personal.logged))
        self.logged = dict(personal.logged)
        self._rearm()
        self.bulk_digest = self.inventory.bulk_digest()
        self.shared_digest = self._shared_digest()


def _differs(at_gate: Personal, here: Personal) -> bool:
    """Whether own leaves changed between gate and boundary. Objects that the gate has shown to be
    equal on all ranks are own leaves no more."""
    before = dict(at_gate.smalls)
    return (
        at_gate.rng != here.rng
        or at_gate.batches != here.batches
        or any(before.get(name) != data for name, data in here.smalls)
        or (at_gate.step_index, at_gate.parts_done) != (here.step_index, here.parts_done)
    )


def _as_text(value: Any) -> str:
    item = getattr(value, "item", None)
    plain = item() if callable(item) else value
    if isinstance(plain, bool) or not isinstance(plain, float):
        return str(plain)
    return plain.hex()
