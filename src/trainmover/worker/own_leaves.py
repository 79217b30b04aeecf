"""A rank's own leaves: what no other rank has, captured at the gate and at each boundary.

Which small objects are own is found out, not declared: the gate compares their digests on all
ranks; those that are equal everywhere are shared, and a joiner gets them from any stayer. In the
first step's gates all are empty still, and equal for that reason only: until a whole step is behind
the gate that compares them, any of them may be own, and peers hold all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainmover.protocol.messages import Version
from trainmover.state.tensors import bytes_digest
from trainmover.worker.personal import Personal

if TYPE_CHECKING:
    from trainmover.worker.stepper import Stepper


class OwnLeaves:
    """Captures one rank's personal state."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.names: frozenset[str] | None = None
        """Small objects that differ by rank; None until the first gate has compared them."""
        self.is_tail_mutating = False
        """Own leaves change after the gate: the gate's copy is not final."""

    @property
    def are_names_sure(self) -> bool:
        """Whether the gate behind the current version has compared what a whole step has left."""
        stepper = self._stepper
        return stepper.step_index > 1 or (stepper.step_index == 1 and bool(stepper.parts_done))

    def smalls(self) -> dict[str, bytes]:
        """Every small leaf as it is now: taken once for all who need it at this instant."""
        inventory = self._stepper.inventory
        return {name: inventory.small_bytes(name) for name in inventory.small_names}

    def capture(
        self, version: Version, smalls: Mapping[str, bytes], rng: bytes, *, is_final: bool
    ) -> Personal:
        is_whole = self._stepper.phase == "boundary" and not self.are_names_sure
        names = list(smalls) if is_whole or self.names is None else sorted(self.names)
        return Personal(
            owner_rank=self._stepper.rank,
            version=version,
            is_final=is_final,
            rng=rng,
            batches=self.positions(),
            smalls=tuple((name, smalls[name]) for name in names),
            logged=tuple(sorted(self._stepper.logbook.before_gate.items())),
            step_index=self._stepper.step_index,
            parts_done=self._stepper.parts_done,
            metrics=self._stepper.metrics.pending(at_gate=self._stepper.phase == "gate"),
            replicas=self._stepper.increments.replicas,
            is_whole=is_whole,
        )

    def without_shared(self, personal: Personal) -> Personal:
        """Only what the last gate has found to differ by rank."""
        if self.names is None or not personal.is_whole:
            return personal
        smalls = tuple(small for small in personal.smalls if small[0] in self.names)
        return replace(personal, smalls=smalls, is_whole=False)

    def positions(self) -> tuple[bytes, ...]:
        """Where the loaders stand; inside a step of several parts, where they stood at its top."""
        if self._stepper.parts_done and self._stepper.reading.has_body_read:
            return self._stepper.top_batches
        return tuple(batches.position() for batches in self._stepper.batches)

    def next_place(self, part: str) -> tuple[int, tuple[str, ...]]:
        """(step index, parts done) behind the gate of `part`."""
        if not part:
            return self._stepper.step_index + 1, ()
        done = (*self._stepper.parts_done, part)
        if self._stepper.part_names is not None and done == self._stepper.part_names:
            return self._stepper.step_index + 1, ()
        return self._stepper.step_index, done

    def small_digests(self, smalls: Mapping[str, bytes] | None = None) -> tuple[int, ...]:
        return tuple(map(bytes_digest, (self.smalls() if smalls is None else smalls).values()))

    def note_tail_mutation(self, at_gate: Personal, here: Personal) -> None:
        if self.is_tail_mutating:
            return
        if at_gate.parts_done and not here.parts_done:
            return  # the first step has shown which parts there are: known from now on
        self.is_tail_mutating = True
        what = "random generators" if at_gate.rng != here.rng else "loader position"
        if at_gate.rng == here.rng and at_gate.batches == here.batches:
            before = dict(at_gate.smalls)
            names = self._changed(before, here)
            what = ", ".join(names) or "position in the step"
        self._stepper.logbook.finding(
            "tail-mutation",
            f"step {self._stepper.step_index - 1}: {what} changed after optimizer.step(); the copy "
            "that peers hold is renewed at each boundary, and a loss in between can't be repaired "
            "from it. Move it in front of optimizer.step() where you can.",
        )

    def has_changed(self, at_gate: Personal, here: Personal) -> bool:
        """Whether own leaves changed between gate and boundary. Objects that the gate has shown to
        be equal on all ranks are own leaves no more."""
        return (
            at_gate.rng != here.rng
            or at_gate.batches != here.batches
            or bool(self._changed(dict(at_gate.smalls), here))
            or (at_gate.step_index, at_gate.parts_done) != (here.step_index, here.parts_done)
        )

    def _changed(self, before: Mapping[str, bytes], here: Personal) -> list[str]:
        """Own leaves, as far as the gate knows them, that are not what they were before."""
        own = before if self.names is None else self.names
        return [name for name, data in here.smalls if name in own and before.get(name) != data]
