"""One worker's part in one switchover: channels, state, backups, in that order (protocol.md W14).

Lives on the I/O thread. Decides only what this worker can do next; whether the switchover counts
is the controller's, when it may begin is the lifecycle's.

    stayer:  prepare channels -> swap -> (main thread: digests, serve) -> renew backups -> done
    joiner:  prepare channels, meanwhile main thread adopts the rank -> swap -> receive
             -> renew backups -> done
    leaver:  (main thread: digests, serve) -> done; it keeps the old channels
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trainmover.protocol.messages import ChannelCount, Edge, Plan
from trainmover.topology.membership import wards_of
from trainmover.worker import orders
from trainmover.worker.events import CutOverBroke, CutOverDone, PhaseOneBroke, PhaseOneDone
from trainmover.worker.personal import PERSONAL, encode

if TYPE_CHECKING:
    from trainmover.worker.runtime import Runtime

POLL_S = 0.05
"""Between looks whether a stayer's first steps are behind it (phase one only)."""


class CutOverRun:
    """Progress of one plan on one worker."""

    def __init__(self, runtime: Runtime, plan: Plan) -> None:
        self._runtime = runtime
        self.plan = plan
        self.rank = plan.membership.rank_of(runtime.incarnation)
        self._is_joiner = runtime.incarnation in plan.joiners and not plan.is_fresh_start
        self._is_phase_one = False
        self._is_started = False
        self._is_preparing = False
        self._is_channel_ready = False
        self._is_adopted = not self._is_joiner
        self._is_swapping = False
        self._count: ChannelCount | None = None
        self._is_receiving = False
        self._has_state = False
        self._has_renewed = plan.is_fresh_start
        self._is_over = False
        self._how = ""
        self._bytes = 0

    @property
    def is_member(self) -> bool:
        """Whether this worker has a rank in the plan (a leaver has none)."""
        return self.rank is not None

    # ------------------------------------------------------------------ asked by the lifecycle

    def prepare(self) -> None:
        """Phase one: in the background of training."""
        self._is_phase_one = True
        self._runtime.reached("prepare", self.plan.number)
        self._begin()
        self._advance()

    def start(self, plan: Plan) -> None:
        """Cut over to `plan` (which now names its target)."""
        self.plan = plan
        self._is_phase_one = False
        self._is_started = True
        if plan.kind == "planned":
            self._runtime.reached("boundary_reached", plan.number)
        self._begin()
        if not self._is_joiner:
            self._runtime.orders.give(orders.Settle(plan))
        self._advance()

    def _begin(self) -> None:
        if self._is_preparing:
            return
        self._is_preparing = True
        if self._is_joiner:
            self._runtime.reached("joiner_chosen", self.plan.number)
            self._runtime.orders.give(orders.Adopt(self.plan))
        if self.rank is not None:
            self._runtime.communicator.prepare(self.plan.membership, self.rank)

    def cancel(self) -> None:
        """The plan is aborted: whatever still arrives is ignored."""
        self._is_over = True

    # ------------------------------------------------------------------ what has happened

    def channels_prepared(self) -> None:
        """All channels the plan adds are open."""
        if not self._is_channel_ready:
            self._is_channel_ready = True
            self._runtime.mark("connected")
            self._runtime.reached("endpoints_exchanged", self.plan.number)
        self._advance()

    def adopted(self, how: str) -> None:
        """Joiner: plays its rank."""
        self._is_adopted = True
        self._how = how
        self._runtime.mark("adopted")
        self._advance()

    def channels_swapped(self, count: ChannelCount) -> None:
        """MARKs of all inherited channels are in."""
        self._count = count
        self._runtime.mark("swapped")
        self._runtime.reached("delta_swapped", self.plan.number)
        self._advance()

    def received(self, amount: int) -> None:
        """Joiner: state complete and verified."""
        self._bytes = amount
        self._has_state = True
        self._runtime.mark("received")
        self._advance()

    def settled(self) -> None:
        """Stayer or leaver: stands at the target."""
        self._has_state = True
        self._runtime.mark("settled")
        self._runtime.exchange.open_serving(self.plan.number)
        self._advance()

    def personal_received(self, generation: int) -> None:
        """Some personal state has come in."""
        if generation == self.plan.number:
            self._advance()

    def failed(self, edge: Edge) -> None:
        """One peer makes this impossible."""
        if self._is_over:
            return
        number = self.plan.number
        if self._is_phase_one:
            self._runtime.dispatch(PhaseOneBroke(number=number, edge=edge))
        else:
            self._runtime.dispatch(CutOverBroke(number=number, edge=edge))

    # ------------------------------------------------------------------ what is next

    def _advance(self) -> None:
        if self._is_over:
            return
        if self._is_phase_one:
            self._advance_phase_one()
        elif not self._is_started:
            return  # phase one is over (a poll may come late): training goes on until the order
        elif self.rank is None:
            if self._has_state:
                self._done()
        else:
            self._advance_member()

    def _advance_phase_one(self) -> None:
        is_open = self._is_channel_ready or self.rank is None
        if not (is_open and self._is_adopted):
            return
        if not self._is_joiner and not self._is_settled():
            self._runtime.engine.call_later(POLL_S, self._advance)
            return
        self._is_phase_one = False
        self._runtime.reached("delta_acknowledged", self.plan.number)
        self._runtime.dispatch(PhaseOneDone(number=self.plan.number))

    def _is_settled(self) -> bool:
        """A joiner has several steps behind it; stayers must have DDP's first ones behind them."""
        stepper = self._runtime.stepper
        limit = self._runtime.config.settle_attempts_max
        if stepper is None or stepper.watch.is_settled:
            return stepper is not None
        limit *= max(1, len(stepper.part_names or ()))
        return stepper.attempts - stepper.buckets.renewed_at >= limit

    def _advance_member(self) -> None:
        if not (self._is_channel_ready and self._is_adopted and self._is_preparing):
            return
        if not self._is_swapping:
            self._is_swapping = True
            is_held = self.plan.is_fresh_start
            self._runtime.communicator.cut_over(self.plan.number, is_held=is_held)
            return
        if self._count is None:
            return
        if self._is_joiner and not self._is_receiving:
            self._is_receiving = True
            self._runtime.orders.give(orders.Receive(self.plan))
            return
        if not self._has_state:
            return
        if not self._has_renewed:
            self._has_renewed = True
            self._renew_backups()
        if self._holds_wards():
            self._done()

    def _renew_backups(self) -> None:
        """Finding 7: whoever backs us up in this generation holds our state of the target."""
        from trainmover.topology.membership import backups_of

        stepper = self._runtime.stepper
        assert stepper is not None
        assert stepper.boundary_personal is not None
        assert self.rank is not None
        personal = msgspec.structs.replace(stepper.boundary_personal, owner_rank=self.rank)
        payload = encode(personal)
        self._runtime.increments.renew(self.plan, self.rank)
        for rank in backups_of(self.rank, self.plan.membership):
            self._runtime.communicator.send_control(rank, PERSONAL, personal.version.step, payload)

    def _holds_wards(self) -> bool:
        if self.plan.is_fresh_start:
            return True
        assert self.rank is not None
        step = self.plan.target.step
        for ward in wards_of(self.rank, self.plan.membership):
            held = self._runtime.store.get(ward, step)
            if held is None or not held.is_final:
                return False
        return True

    def _done(self) -> None:
        self._is_over = True
        stepper = self._runtime.stepper
        is_fresh = self.plan.is_fresh_start or stepper is None
        self._runtime.dispatch(
            CutOverDone(
                number=self.plan.number,
                version=self.plan.target,
                identity="" if is_fresh or stepper is None else stepper.inventory.identity,
                bulk_digest=0 if is_fresh or stepper is None else stepper.bulk_digest,
                shared_digest=0 if is_fresh or stepper is None else stepper.shared_digest,
                channels=self._count or ChannelCount(),
                bytes_received=self._bytes,
                adopted=self._how,
                marks=self._runtime.take_marks(),
            )
        )
