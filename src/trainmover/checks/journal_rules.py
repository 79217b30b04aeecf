"""Invariants that the journal alone can break: I5 (first half) and I6.

Decides record by record, in the order in which they were made durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainmover.checks.observations import Violation
from trainmover.protocol.journal import (
    AbortRecorded,
    AnyRecord,
    CommitRecorded,
    CompleteRecorded,
    IncidentOpened,
    PlanRecorded,
    StoppedRecorded,
    TargetFixed,
    TermTaken,
)
from trainmover.protocol.messages import Plan, Version


@dataclass
class JournalBook:
    """What the records so far say."""

    plans: dict[int, Plan] = field(default_factory=dict)
    targets: dict[int, Version] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    time_lines: list[tuple[Version, int]] = field(default_factory=list)
    """Target and number of committed plans behind which earlier steps count no more."""
    given: set[int] = field(default_factory=set)
    """Every number ever used, by a freeze or a plan."""
    last_term: int = 0
    is_complete: bool = False
    is_stopped: bool = False

    def open_numbers(self) -> list[int]:
        """Numbers that are neither committed nor aborted."""
        return sorted(self.given - self.committed - self.aborted)


def append(book: JournalBook, record: AnyRecord) -> list[Violation]:
    """Enter `record`; what it violates."""
    found: list[Violation] = []
    match record:
        case TermTaken(term=term):
            if term <= book.last_term:
                found.append(_violation("I5", f"term {term} is not above {book.last_term}"))
            book.last_term = term
        case IncidentOpened(number=number):
            found += _give(book, number)
        case PlanRecorded(plan=plan):
            found += _plan(book, plan)
        case TargetFixed(number=number, target=target):
            if book.targets.get(number, target) != target:
                found.append(_violation("I6", f"{number} has two targets"))
            book.targets[number] = target
        case CommitRecorded(number=number):
            found += _settle(book, number, book.committed, book.aborted)
            _note_time_line(book, number)
        case AbortRecorded(number=number):
            found += _settle(book, number, book.aborted, book.committed)
        case CompleteRecorded():
            book.is_complete = True
        case StoppedRecorded():
            book.is_stopped = True
        case _:
            pass
    return found


def _note_time_line(book: JournalBook, number: int) -> None:
    plan = book.plans.get(number)
    if plan is not None and (plan.is_rollback or plan.is_fresh_start):
        book.time_lines.append((plan.target, number))


def _violation(invariant: str, text: str) -> Violation:
    return Violation(invariant=invariant, text=text)


def _give(book: JournalBook, number: int) -> list[Violation]:
    found = []
    if book.given and number <= max(book.given):
        found.append(_violation("I6", f"number {number} is not above all used ones"))
    if book.open_numbers():
        text = f"number {number} is given while {book.open_numbers()} is open"
        found.append(_violation("I6", text))
    book.given.add(number)
    return found


def _plan(book: JournalBook, plan: Plan) -> list[Violation]:
    found = []
    number = plan.number
    if number in book.plans:
        found.append(_violation("I6", f"number {number} has two plans"))
    if number not in book.given:
        found += _give(book, number)
    if number in book.committed or number in book.aborted:
        found.append(_violation("I6", f"a plan for the settled number {number}"))
    base = max(book.committed, default=0)
    if plan.base_generation != base:
        text = f"plan {number} builds on {plan.base_generation}, committed is {base}"
        found.append(_violation("I6", text))
    book.plans[number] = plan
    if plan.target.step >= 0:
        book.targets[number] = plan.target
    return found


def _settle(book: JournalBook, number: int, into: set[int], other: set[int]) -> list[Violation]:
    found = []
    if number in other:
        found.append(_violation("I5", f"commit and abort of {number}"))
    if into is book.committed and number not in book.plans:
        found.append(_violation("I5", f"commit of {number}, which has no plan"))
    if into is book.committed and number not in book.targets:
        found.append(_violation("I5", f"commit of {number}, which has no target"))
    into.add(number)
    return found
