"""What happens to the controller, and what it asks for. Pure data."""

from __future__ import annotations

import msgspec

from trainmover.protocol.journal import AnyRecord
from trainmover.protocol.messages import (
    FromAgentMessage,
    FromOperatorMessage,
    OperatorReply,
    ToAgentMessage,
)


class ControllerEvent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of what happens to the controller."""


class FromAgent(ControllerEvent, frozen=True, kw_only=True):
    """A message on the link of `machine`."""

    machine: str
    body: FromAgentMessage


class AgentLinked(ControllerEvent, frozen=True, kw_only=True):
    """The link of `machine` is up; `AgentHello` follows or has come."""

    machine: str


class AgentUnlinked(ControllerEvent, frozen=True, kw_only=True):
    """The link of `machine` is gone."""

    machine: str


class FromOperator(ControllerEvent, frozen=True, kw_only=True):
    """A request of the operator."""

    body: FromOperatorMessage


class Tick(ControllerEvent, frozen=True, kw_only=True):
    """Time has passed."""


Event = FromAgent | AgentLinked | AgentUnlinked | FromOperator | Tick


class ControllerCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of commands; carried out in order, an `Append` durably before any later one."""


class Append(ControllerCommand, frozen=True, kw_only=True):
    """Write `record` to the journal and flush it."""

    record: AnyRecord


class ToAgent(ControllerCommand, frozen=True, kw_only=True):
    """Send on the link of `machine`; dropped where there is no link, since it is sent again."""

    machine: str
    body: ToAgentMessage


class ToOperator(ControllerCommand, frozen=True, kw_only=True):
    """Answer a request."""

    reply: OperatorReply


class PhaseReached(ControllerCommand, frozen=True, kw_only=True):
    """A point of protocol/phases.py has been passed; does nothing outside drills."""

    name: str
    number: int


class EndJob(ControllerCommand, frozen=True, kw_only=True):
    """The last command: the controller's process ends with `code`."""

    code: int
    reason: str


Command = Append | ToAgent | ToOperator | PhaseReached | EndJob
