"""From the gate to the next boundary: what happens to a step whose tail a loss has struck.

A collective behind the gate needs everybody, and the state it started from is gone with the update.
So ranks of a script that calls such collectives keep what they had in front of the gate (agreed in
the gate itself, `tail_copy`). A rank whose tail is cut short goes back there, and a plan leads all
others back too: the step is repeated as a whole (decision 0009).

Whether a script calls such collectives shows in its first tail only, so a copy is kept in front of
that one in any case. Without a copy (a tail's first collective in a later step,
`worker.exact_tail`, `worker.tail_copy_limit_mb`) the value is dropped; digests from before the
first invented value and from the boundary show whether state was touched (protocol.md B2; version
counters miss writes through `.data`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmover.errors import ScriptError
from trainmover.protocol.flags import GateResult
from trainmover.units import MIB
from trainmover.worker.events import TailStruck
from trainmover.worker.frames import is_called_by_script
from trainmover.worker.sequence import script_place
from trainmover.worker.tail_copy import TailCopy
from trainmover.worker.unwinding import StepUndone

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper

MASK = (1 << 63) - 1
WATCHED_GATES = 3
"""First gates at which the size of a copy is taken, whether one is wanted or not."""


class Tail:
    """Watches one rank's tails."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.copy = TailCopy(stepper)
        self.is_void = False
        """A collective of this tail was cut short, and what was in front of the gate is kept."""
        self.digest: int | None = None
        """Of all state, from before the first invented value; None where none was invented."""
        self.has_collectives = False
        """A collective has been called behind a gate."""
        self.is_in_step = False
        """The script is inside `with step:` or `step.run`, which can take it out of its tail."""
        self._first_step: int | None = None
        """Step whose tail is the first that this entry of `main` runs; None before its gate."""
        self._is_joiner = stepper.is_shadow
        self._is_refused = False
        self._looks = 0
        self._size_bytes = 0

    # ------------------------------------------------------------------ in and behind the gate

    @property
    def wants_copy(self) -> bool:
        """For the gate: whether this rank has reason to keep what is in front of it."""
        host = self._stepper.host
        if not host.is_managed or self._stepper.world_size == 1:
            return False
        return self._needs_copy or (host.config.exact_tail == "seen" and self._is_untried)

    @property
    def _needs_copy(self) -> bool:
        kind = self._stepper.host.config.exact_tail
        return kind == "always" or (kind == "seen" and self.has_collectives)

    @property
    def _is_untried(self) -> bool:
        """Whether no step of this entry has been whole; a joiner's own iterations count as one."""
        first = self._first_step
        return not self._is_joiner and (first is None or self._stepper.step_index <= first)

    @property
    def is_repeatable(self) -> bool:
        """Whether a step may have more than one update with communication between them."""
        return self._stepper.is_shadow or self._stepper.host.config.exact_tail != "off"

    @property
    def refuses_copy(self) -> bool:
        """For the gate: whether it has no room for one."""
        host = self._stepper.host
        if not host.is_managed or host.config.exact_tail == "off":
            return True
        if self._looks < WATCHED_GATES or self.wants_copy or self.copy.version is not None:
            self._looks += 1
            self._size_bytes = self.copy.size_bytes
        size, limit = self._size_bytes, host.config.tail_copy_limit_mb * MIB
        if size > limit and self._needs_copy and not self._is_refused:
            self._is_refused = True
            self._stepper.logbook.finding(
                "tail-collective",
                f"{size / MIB:.0f} MB of state can't be kept in front of each gate "
                f"(worker.tail_copy_limit_mb is {host.config.tail_copy_limit_mb}): a loss behind "
                "optimizer.step() drops the values of collectives there",
            )
        return size > limit

    def passed(self, result: GateResult) -> None:
        """The gate has passed; nothing is updated yet."""
        self.is_void = False
        if self._stepper.is_shadow:
            return
        if self._first_step is None:
            self._first_step = self._stepper.step_index
        if result.is_copy_kept:
            # A copy for one step must not cost a device that is nearly full its first steps.
            self.copy.capture(is_on_host=not self._needs_copy)
            self._stepper.host.guard_waits(self.leave)
        elif self.copy.version is not None:
            self.copy.drop()

    def called(self) -> None:
        """A collective is entered."""
        stepper = self._stepper
        if stepper.phase != "tail" or self.has_collectives:
            return
        self.has_collectives = True
        is_named = stepper.is_shadow or stepper.watch.on_early is not None  # `early_findings`
        if not is_named and stepper.host.config.exact_tail == "seen":
            stepper.logbook.finding(
                "tail-collective",
                f"{script_place()}: step {stepper.step_index - 1} calls a collective after "
                "optimizer.step() for the first time: each rank keeps a copy of its state in front "
                "of every update from now on (worker.exact_tail)",
            )

    # ------------------------------------------------------------------ struck

    def strike(self) -> bool:
        """A value is about to be invented; any thread. Whether this tail was whole so far."""
        stepper = self._stepper
        if stepper.phase != "tail" or stepper.is_shadow:
            return False
        if self.copy.is_in_front_of(stepper.version):
            was_whole, self.is_void = not self.is_void, True
            return was_whole
        if self.digest is None:
            self.digest = self.whole_digest()
            return True
        return False

    def invented(self) -> None:
        """Thread of the call: a collective is called that nobody will take part in. Raises
        StepUndone."""
        if self.strike():
            self._stepper.host.post(TailStruck(step=self._stepper.version.step - 1))
        self.leave()

    def leave(self) -> None:
        """Out of a tail that was cut short, before the script sees a value of it.

        Raises StepUndone where nothing of torch is left halfway by it; else the tail runs out.
        """
        if self.is_void and self.is_in_step and is_called_by_script():
            raise StepUndone

    @property
    def can_be_left(self) -> bool:
        """Whether a loop on invented values may be ended by StepUndone."""
        return self.is_void and self.is_in_step

    def whole_digest(self) -> int:
        """Of all tracked state of this rank."""
        value = self._stepper.inventory.bulk_digest()
        for digest in self._stepper.own.small_digests():
            value = (value * 1_000_003 + digest) & MASK
        return value

    # ------------------------------------------------------------------ going back

    def undo_gate(self) -> None:
        """Inside the step: back in front of the gate; what an undo puts back is put back next."""
        stepper, personal = self._stepper, self.copy.personal
        version = self.copy.version
        assert version is not None
        assert personal is not None
        self._tell(stepper.version.step - 1)
        self.copy.put_back_bulk()
        stepper.version = version
        stepper.step_index, stepper.parts_done = personal.step_index, personal.parts_done
        # That gate has shown other objects to be own, perhaps: a joiner has those of before.
        names = frozenset(name for name, _ in personal.smalls)
        stepper.own.names = names if version.step > 0 else None
        self._settle()

    def go_back(self) -> None:
        """At a boundary: all of this rank's state as it was one gate before."""
        stepper, personal = self._stepper, self.copy.personal
        version = self.copy.version
        assert version is not None
        assert personal is not None
        if self.is_void:
            self._tell(stepper.version.step - 1)
        try:
            self.copy.put_back()
        except ScriptError as error:
            stepper.give_up(str(error))  # what can't be put back can be fetched
        stepper.broken_state = ""
        stepper.roles.put_own(personal, version, is_ours=True)
        stepper.host.clear_taint()
        stepper.watch.cancel()
        stepper.host.undone()
        stepper.has_rolled_back = True
        self._settle()

    def _settle(self) -> None:
        stepper = self._stepper
        self.is_void = False
        stepper.gate_personal = None
        stepper.increments.gone_back()
        stepper.snapshots.begun_at(stepper.version.step)
        stepper.host.guard_waits(None)

    def _tell(self, step: int) -> None:
        watch = self._stepper.watch
        what = f" ({watch.last_invented})" if watch.last_invented else ""
        self._stepper.logbook.finding(
            "tail-undone",
            f"step {step}: a collective after optimizer.step(){what} was cut short by a loss; the "
            "update is taken back and the step repeated",
        )

    # ------------------------------------------------------------------ the boundary

    def end(self) -> None:
        """The tail is over; where it is void, `go_back` follows."""
        stepper = self._stepper
        if stepper.phase != "tail":
            return
        stepper.host.guard_waits(None)
        if self.is_void:
            stepper.watch.cancel()
            return
        stepper.watch.end()
        if self.digest is None or stepper.is_shadow:
            return  # no value was invented behind the gate, whatever has broken since
        step = stepper.step_index - 1
        if self.whole_digest() != self.digest:
            stepper.broken_state = (
                f"a collective after optimizer.step() of step {step} was cut short and state has "
                "changed since"
            )
        else:
            stepper.logbook.finding(
                "dropped",
                f"step {step}: a collective after optimizer.step() was cut short by a loss "
                f"({stepper.watch.last_invented}); its value is dropped, state is untouched. "
                'Use step.log(..., reduce="mean") or put it in front of optimizer.step().',
            )
        stepper.host.clear_taint()
