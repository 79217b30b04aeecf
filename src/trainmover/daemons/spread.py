"""Sends the controller's messages and knows the two points of a drill that lie between them.

A decision is journaled, then told to everybody it concerns. `journalled_not_sent` is passed between
the two, `sent_to_half` in the middle of the second; the decider can name neither, because both lie
inside one list of commands.
"""

from __future__ import annotations

from collections.abc import Callable

from trainmover.edges import faults
from trainmover.protocol.journal import AnyRecord, CommitRecorded, PlanRecorded, TargetFixed
from trainmover.protocol.messages import Commit, PlanIssued, Prepare, ToAgentMessage, ToWorker

WHO = "controller"


class Spread:
    """Counts how many of those concerned have been told of the decision journaled last."""

    def __init__(self, send: Callable[[str, ToAgentMessage], bool]) -> None:
        self._send = send
        self._number = 0
        self._concerned = 0
        self._members: dict[int, int] = {}
        self._told = 0

    def journaled(self, record: AnyRecord) -> None:
        """A record is durable; nobody has been told of it."""
        match record:
            case PlanRecorded(plan=plan):
                count = plan.membership.world_size + len(plan.leavers)
                self._members[plan.number] = count
                self._begin(plan.number)
            case TargetFixed(number=number) | CommitRecorded(number=number):
                self._begin(number)
            case _:
                return

    def send(self, machine: str, message: ToAgentMessage) -> None:
        """Send; the message is lost where there is no link, and comes again."""
        self._send(machine, message)
        if not isinstance(message, ToWorker):
            return
        match message.body:
            case Prepare(plan=plan) | PlanIssued(plan=plan):
                self._tell(plan.number)
            case Commit(number=number):
                self._tell(number)
            case _:
                return

    def _begin(self, number: int) -> None:
        self._number = number
        self._concerned = self._members.get(number, 0)
        self._told = 0
        faults.reached("journalled_not_sent", WHO, number)

    def _tell(self, number: int) -> None:
        if number != self._number:
            return
        self._told += 1
        if self._told == max(1, self._concerned // 2):
            faults.reached("sent_to_half", WHO, number)
