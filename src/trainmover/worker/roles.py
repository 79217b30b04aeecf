"""Taking part in a switchover on the main thread: settle, adopt a rank, receive its state.

Invariant I9: a joiner's bulk, own and shared leaves are all of the plan's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainmover.errors import RemoteProtocolError, StateMismatch, TransportError
from trainmover.protocol import exits
from trainmover.protocol.messages import Edge, Plan, Version
from trainmover.state.rng import restore_rng
from trainmover.state.transfer import receive_state
from trainmover.worker import orders
from trainmover.worker.personal import Personal
from trainmover.worker.playing import receive_played
from trainmover.worker.unwinding import Halted, Reentered

if TYPE_CHECKING:
    from trainmover.checkpoint.bounded import Watch
    from trainmover.worker.stepper import Stepper

MASK = (1 << 63) - 1


class Roles:
    """What the main thread does for a plan, at a boundary."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.void_load: Watch | None = None
        """Of a load that was called off: it may still write into this rank's state."""

    def settle(self, plan: Plan) -> bool:
        """Stayer or leaver at the target. True: run one more attempt out first (Plan.attempts)."""
        stepper = self._stepper
        if plan.is_fresh_start:
            # Only now may channels go live: a `main` that still builds would use them half-way.
            stepper.host.settled(plan)
            return False
        if (
            stepper.attempts < plan.attempts
            and not stepper.watch.is_settled
            and stepper.host.is_running_out
        ):
            stepper.settling = plan
            return True
        if plan.is_rollback:
            self.receive(plan)
            return False
        self._renew_buckets(plan)
        if plan.target.step < stepper.version.step:
            self._go_back(plan)
        if plan.kind == "unplanned" and plan.joiners and stepper.metrics.drop_late():
            stepper.logbook.finding(
                "dropped",
                f"step {stepper.step_index - 1}: reduced values logged behind optimizer.step() are "
                "dropped after a loss; log them in front of it to keep them",
            )
        stepper.restored.drop()
        stepper.bulk_digest = stepper.inventory.bulk_digest()
        stepper.shared_digest = self.shared_digest_now()
        stepper.host.settled(plan)
        return False

    def _renew_buckets(self, plan: Plan) -> None:
        """Members may stand at different layouts of DDP's buckets: every one starts over."""
        if plan.renews_buckets:
            self._stepper.buckets.renew()

    def _go_back(self, plan: Plan) -> None:
        """Another rank's tail was cut short: the step that ends in it is repeated by all."""
        stepper = self._stepper
        if stepper.tail.copy.version != plan.target:
            text = f"plan {plan.number} goes back to {plan.target}, of which nothing is kept"
            raise Halted(exits.PROTOCOL_FAILED, text)
        stepper.tail.go_back()

    def shared_digest_now(self) -> int:
        stepper = self._stepper
        if not stepper.own.are_names_sure:
            return 0
        own = set(stepper.inventory.small_names) if stepper.own.names is None else stepper.own.names
        value = 0
        for name in stepper.inventory.small_names:
            if name not in own:
                value = (value * 1_000_003 + stepper.inventory.small_digest(name)) & MASK
        return value

    def adopt(self, plan: Plan) -> None:
        stepper = self._stepper
        rank = plan.membership.rank_of(stepper.host.incarnation)
        if rank is None:
            raise Halted(exits.PROTOCOL_FAILED, f"plan {plan.number} does not name this worker")
        if stepper.host.is_void(plan):
            return  # to enter `main` again for it would keep the next plan waiting
        is_too_warm = plan.kind == "unplanned" and plan.attempts < stepper.attempts
        walk = stepper.host.walk
        is_other = walk is not None and walk.is_other_class(stepper.rank, rank)
        must_repeat = rank != stepper.rank and (is_other or not self._can_play(rank))
        if (is_too_warm or must_repeat) and not (
            stepper.entry.is_adoption and rank == stepper.rank
        ):
            # A rank can't be played by objects built for another; and stayers whose first steps
            # are not behind them have other DDP buckets than a standby that ran several.
            stepper.host.orders.give(orders.Adopt(plan))
            raise Reentered(
                orders.RunMain(
                    rank=rank,
                    world_size=stepper.world_size,
                    is_loopback=True,
                    attempts=plan.attempts if is_too_warm else -1,
                    version=plan.target.step,
                    is_adoption=True,
                    number=stepper.entry.number,
                    rehearsals=() if walk is None else walk.rehearsals_for(rank),
                )
            )
        how = "as_built" if rank == stepper.entry.rank else "in_place"
        if stepper.entry.is_adoption:
            how = "reentered"
        for batches in stepper.batches:
            batches.set_rank(rank, stepper.rank, stepper.world_size)
        stepper.rank = rank
        stepper.host.set_rank(rank)
        stepper.host.adopted(plan, how)
        self._start_loaders(plan)

    def _start_loaders(self, plan: Plan) -> None:
        """Loader workers start while stayers run out or train on; the exact place comes later."""
        stepper = self._stepper
        if not stepper.batches or plan.is_rollback:
            return
        try:
            hint = stepper.host.peek_personal(plan, stepper.rank)
            if hint is not None and len(hint.batches) == len(stepper.batches):
                for batches, position in zip(stepper.batches, hint.batches, strict=True):
                    batches.restore(position)
        except (TransportError, StateMismatch) as error:
            # Only a head start is lost: the state itself is fetched, and judged, in `receive`.
            stepper.logbook.finding("transfer", f"no head start for loader workers: {error}")
        stepper.host.mark("loaders started")

    def _can_play(self, rank: int) -> bool:
        stepper = self._stepper
        if stepper.host.rank_readers():
            return False
        size = stepper.world_size
        return all(batches.set_rank(rank, stepper.rank, size) for batches in stepper.batches)

    def receive(self, plan: Plan) -> None:
        """Fetch and verify the state that `plan` names for this rank."""
        self._renew_buckets(plan)
        if plan.is_rollback:
            self._roll_back(plan)
        else:
            self._receive_live(plan)

    def _roll_back(self, plan: Plan) -> None:
        """Load the snapshot of the plan's target; joiners and stayers alike."""
        stepper = self._stepper
        side = stepper.host.snapshots
        assert side is not None
        if self.void_load is not None and not self.void_load.has_ended:
            text = "storage that has given no answer may still write into this process's state"
            raise Halted(exits.INTERRUPTED, text)
        try:
            with side.open(plan, stepper.rank, stepper.host.errand(plan)) as fetch:
                amount = stepper.snapshots.load(fetch.description, fetch.read, fetch.bulk_digest)
                fetch.end()
            personal = stepper.snapshots.personal_of(fetch.description)
        except (TransportError, StateMismatch, RemoteProtocolError) as error:
            # Half-loaded state does no harm: the next plan loads all of it again.
            peer = next((s.machine for s in plan.sources if s.rank == stepper.rank), "")
            stepper.host.failed(plan, Edge(peer=peer, reason=str(error)))
            return
        stepper.host.mark("snapshot loaded")
        self.put_own(personal, plan.target)
        stepper.has_rolled_back = True
        source = f"snapshot of step {plan.target.step}"
        stepper.restored.begin(source, fetch.description.loss, is_exact=True)
        stepper.host.received(plan, amount)

    def _receive_live(self, plan: Plan) -> None:
        stepper = self._stepper

        def receive(stream: Any, progress: Callable[[float], None]) -> int:
            return receive_state(stream, stepper.inventory, progress=progress).bytes

        source = next(source for source in plan.sources if source.rank == stepper.rank)
        if source.kind == "increments":
            receive_played(stepper, plan, source)
            return
        peer = source.bulk_from
        try:
            amount = stepper.host.fetch_state(plan, stepper.rank, receive)
            stepper.host.mark("bulk received")
            peer = source.own_from
            personal = stepper.host.fetch_personal(plan, stepper.rank)
        except (TransportError, StateMismatch) as error:
            # Half-loaded state does no harm: the next plan loads all of it again.
            stepper.host.failed(plan, Edge(peer=peer, reason=str(error)))
            return
        if personal.version.step != plan.target.step:
            text = f"personal state at version {plan.target.step}, got {personal.version.step}"
            stepper.host.failed(plan, Edge(peer=peer, reason=f"expected {text}"))
            return
        stepper.host.mark("own received")
        self.put_own(personal, plan.target)
        stepper.host.received(plan, amount)

    def put_own(
        self,
        personal: Personal,
        target: Version,
        *,
        are_names_known: bool = True,
        is_ours: bool = False,
    ) -> None:
        """Own leaves of this rank at `target`, whose bulk and shared leaves are in place.

        Args:
            personal: Where they come from.
            target: Version that this rank is at afterwards.
            are_names_known: The gate has shown which small leaves are own.
            is_ours: This process was there before: its log lines are told.
        """
        stepper = self._stepper
        names = frozenset(name for name, _ in personal.smalls)
        stepper.own.names = names if target.step > 0 and are_names_known else None
        for name, data in personal.smalls:
            stepper.inventory.load_small(name, data)
        for batches, position in zip(stepper.batches, personal.batches, strict=True):
            batches.restore(position)
        restore_rng(personal.rng)
        stepper.metrics.put(personal.metrics)
        stepper.increments.replicas = personal.replicas or stepper.increments.replicas
        stepper.version = target
        stepper.step_index = personal.step_index
        stepper.parts_done = personal.parts_done
        stepper.top_batches = personal.batches
        stepper.reading.begin()
        stepper.rng_for_part = personal.rng if personal.parts_done else None
        stepper.is_shadow = False
        if stepper.host.walk is not None:
            stepper.host.walk.adopted()
        stepper.gate_personal = stepper.boundary_personal = None
        if stepper.rank == 0 and personal.logged and not is_ours:
            # The lost primary may have passed the gate and died before telling its log line.
            behind = stepper.step_index if stepper.parts_done else stepper.step_index - 1
            stepper.logbook.tell(behind, dict(personal.logged), is_again=True)
        stepper.logbook.before_gate = dict(personal.logged)
        stepper.rearm()
        stepper.bulk_digest = stepper.inventory.bulk_digest()
        stepper.shared_digest = self.shared_digest_now()
