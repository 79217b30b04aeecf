"""Invariants of training (I1-I4, I5 second half, I7-I11) and of the numbers (P2), event by event.

Decides on observations in the order in which they happened in one world; a drill that only has
per-process orders feeds them sorted by its own clock and leaves I2 and I3 out.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainmover.checks import journal_rules
from trainmover.checks.observations import (
    Applied,
    AttemptBegan,
    Ended,
    GateEntered,
    GatePassed,
    JoinerLoaded,
    Observation,
    PreparedAt,
    Reported,
    RunsIn,
    SnapshotLoaded,
    StepReached,
    Violation,
)
from trainmover.protocol.journal import AnyRecord
from trainmover.protocol.messages import Version
from trainmover.topology.membership import Membership, wards_of


class Checker:
    """Remembers what the invariants need of the past.

    Args:
        reference: Digest by step and rank of the uninterrupted run; empty: numbers unchecked.
    """

    def __init__(self, reference: Sequence[Sequence[int]] = ()) -> None:
        self.reference = reference
        self.book = journal_rules.JournalBook()
        self.entered: dict[tuple[int, int], set[str]] = {}
        self.entries: set[tuple[str, int, int]] = set()
        self.results: dict[tuple[int, int], tuple[int, ...]] = {}
        self.reported: dict[str, int] = {}
        self.steps: dict[str, tuple[int, int]] = {}
        """Generation and applied step of each running member."""
        self.prepared: dict[tuple[str, int], Version] = {}
        self.newest_pass = 0
        self.layouts: dict[tuple[int, int], tuple[str, int]] = {}
        """Who ran a step of a generation first, and at which bucket layout."""

    def append(self, record: AnyRecord) -> list[Violation]:
        """A record became durable."""
        return journal_rules.append(self.book, record)

    def observe(self, event: Observation) -> list[Violation]:
        """Something happened in a worker."""
        match event:
            case AttemptBegan():
                return self._on_began(event)
            case GateEntered():
                return self._on_entered(event)
            case GatePassed():
                return self._on_passed(event)
            case Applied():
                return self._on_applied(event)
            case StepReached():
                return self._on_step(event)
            case Reported(incarnation=name, number=number):
                self.reported[name] = max(number, self.reported.get(name, 0))
                return []
            case JoinerLoaded():
                return self._on_loaded(event)
            case SnapshotLoaded():
                return self._on_snapshot(event)
            case PreparedAt():
                return self._on_prepared(event)
            case RunsIn():
                return self._on_runs(event)
            case Ended(incarnation=name):
                self.steps.pop(name, None)
                return []
            case _:
                return []

    def _membership(self, generation: int) -> Membership | None:
        plan = self.book.plans.get(generation)
        return plan.membership if plan is not None else None

    def _on_began(self, event: AttemptBegan) -> list[Violation]:
        key, own = (event.generation, event.step), (event.incarnation, event.layout)
        name, layout = self.layouts.setdefault(key, own)
        if layout == event.layout:
            return []
        text = f"{event.incarnation} runs step {event.step} of {event.generation} at layout "
        return [_violation("I14", f"{text}{event.layout}, {name} at {layout}")]

    def _on_entered(self, event: GateEntered) -> list[Violation]:
        found = []
        name, key = event.incarnation, (event.generation, event.step)
        if event.is_tainted:
            text = f"{name} enters gate {event.step} of {event.generation} with invented values"
            found.append(_violation("I1", text))
        if (name, *key) in self.entries:
            text = f"{name} contributes twice to gate {event.step} of {event.generation}"
            found.append(_violation("I7", text))
        membership = self._membership(event.generation)
        if membership is not None and not event.is_finish:
            needed = {(ward, event.step + 1) for ward in wards_of(event.rank, membership)}
            missing = sorted(needed - set(event.held))
            if missing:
                text = f"{name} enters gate {event.step} of {event.generation} without {missing}"
                found.append(_violation("I8", text))
        self.entries.add((name, *key))
        self.entered.setdefault(key, set()).add(name)
        return found

    def _on_passed(self, event: GatePassed) -> list[Violation]:
        found = []
        name, generation, step = event.incarnation, event.generation, event.step
        membership = self._membership(generation)
        members = membership.members if membership is not None else ()
        entered = self.entered.get((generation, step), set())
        absent = [member.incarnation for member in members if member.incarnation not in entered]
        if absent:
            text = f"{name} passes gate {step} of {generation}, {absent} never entered"
            found.append(_violation("I1", text))
        if self.reported.get(name, 0) > generation:
            text = f"{name} passes gate {step} of {generation} after its report"
            found.append(_violation("I3", text))
        if generation < self.newest_pass:
            text = f"{name} passes gate {step} of {generation}; {self.newest_pass} passes already"
            found.append(_violation("I11", text))
        self.newest_pass = max(self.newest_pass, generation)
        return found

    def _on_applied(self, event: Applied) -> list[Violation]:
        found = []
        name = event.incarnation
        known = self.results.setdefault((event.lineage, event.step), event.result)
        if known != event.result:
            text = f"{name} applies step {event.step} of {event.lineage} with another result"
            found.append(_violation("I10", text))
        if event.by_plan == 0 and self.reported.get(name, 0) > event.lineage:
            text = f"{name} applies step {event.step} of {event.lineage} after its report"
            found.append(_violation("I3", text))
        return found

    def _on_step(self, event: StepReached) -> list[Violation]:
        name = event.incarnation
        self.steps[name] = (event.generation, event.step)
        found = self._check_spread(event.generation, event.step, name)
        if event.step < len(self.reference):
            expected = self.reference[event.step][event.rank]
            if expected != event.digest:
                text = f"{name} as rank {event.rank} at step {event.step} has other numbers"
                found.append(_violation("P2", text))
        return found

    def _check_spread(self, generation: int, step: int, name: str) -> list[Violation]:
        found = []
        for other in sorted(self.steps):
            at_generation, at_step = self.steps[other]
            if at_generation != generation or other == name:
                continue
            low, low_name = min((step, name), (at_step, other))
            spread = abs(step - at_step)
            has_entered = low_name in self.entered.get((generation, low), set())
            if spread > 1 or (spread == 1 and not has_entered):
                text = f"in {generation} {name} is at {step}, {other} at {at_step}"
                found.append(_violation("I2", text))
        return found

    def _on_loaded(self, event: JoinerLoaded) -> list[Violation]:
        target = self.book.targets.get(event.number)
        parts = {event.bulk, event.own, event.shared}
        if parts != {target}:
            text = f"{event.incarnation} is made of {sorted(parts)} for {event.number}: {target}"
            return [_violation("I9", text)]
        return []

    def is_void(self, version: Version) -> bool:
        """Whether `version` lies on a time line that a committed plan has left."""
        return any(
            version.step > target.step and version.lineage < number
            for target, number in self.book.time_lines
        )

    def _on_snapshot(self, event: SnapshotLoaded) -> list[Violation]:
        """Everyone loads exactly the plan's version, never one that was rolled back."""
        found = []
        target = self.book.targets.get(event.number)
        if event.version != target:
            text = f"{event.incarnation} has loaded {event.version} for {event.number}: {target}"
            found.append(_violation("I9", text))
        if self.is_void(event.version):
            text = f"{event.incarnation} loads {event.version}, which was rolled back"
            found.append(_violation("I13", text))
        return found

    def _on_prepared(self, event: PreparedAt) -> list[Violation]:
        self.prepared[event.incarnation, event.number] = event.applied
        return self._check_prepared(event.incarnation, event.number)

    def _check_prepared(self, name: str, number: int) -> list[Violation]:
        """A planned switchover's target may be fixed after the first rank is prepared."""
        target = self.book.targets.get(number)
        applied = self.prepared.get((name, number))
        plan = self.book.plans.get(number)
        is_fresh = plan is not None and plan.is_fresh_start
        if target is None or applied is None or applied == target or is_fresh:
            return []
        return [_violation("I4", f"{name} prepared for {number} at {applied}: {target}")]

    def _on_runs(self, event: RunsIn) -> list[Violation]:
        found = self._check_prepared(event.incarnation, event.generation)
        if event.generation not in self.book.committed:
            text = f"{event.incarnation} runs in {event.generation}, which is not committed"
            found.append(_violation("I5", text))
        membership = self._membership(event.generation)
        if membership is None or membership.rank_of(event.incarnation) is None:
            text = f"{event.incarnation} runs in {event.generation} without being a member"
            found.append(_violation("I5", text))
        target = self.book.targets.get(event.generation)
        if target is not None:
            self.steps[event.incarnation] = (event.generation, target.step)
        return found


def _violation(invariant: str, text: str) -> Violation:
    return Violation(invariant=invariant, text=text)
