"""The gate behind the loop: nobody leaves before every rank has finished (protocol.md W6, C6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.protocol import flags
from trainmover.worker import orders
from trainmover.worker.events import GateRequested
from trainmover.worker.unwinding import StepUndone

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


class FinishGate:
    """Entered when the loop has no step left."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def run(self) -> bool:
        """True when every rank has finished; False: back to the boundary and on from there.

        Raises: Left, Reentered, Halted.
        """
        stepper = self._stepper
        stepper.snapshots.take_last()
        try:
            while True:
                order = self._enter()
                if isinstance(order, orders.Finish):
                    stepper.phase = "finished"
                    return True
                # An incident came between and was repaired: the gate is entered again.
                stepper.phase = "running"
        except StepUndone:
            stepper.undo()
            return False

    def _enter(self) -> orders.Order:
        """Finish when the job is complete, Go when the gate must be repeated."""
        stepper = self._stepper
        if stepper.host.is_tainted:
            raise StepUndone
        stepper.phase = "gate"
        stepper.host.note("finish", stepper.version.step)
        vector = flags.encode(
            flags.GateFlags(
                has_update=False,
                names_digest=stepper.inventory.names_digest,
                digests=stepper.own.small_digests(),
            )
        )
        stepper.host.post(GateRequested(step=stepper.version.step, kind=flags.FINISH, flags=vector))
        while True:
            order = stepper.host.orders.take()
            match order:
                case orders.Finish() | orders.Go():
                    return order
                case orders.Undo():
                    raise StepUndone
                case orders.Settle():
                    stepper.roles.settle(order.plan)
                case _:
                    stepper.unwind(order)
