"""What happens to the controller, and what it asks for. Pure data."""

from __future__ import annotations

import msgspec

from trainmover.controller.kept import NO_VERSION, Restored
from trainmover.protocol.journal import AnyRecord
from trainmover.protocol.messages import (
    FromAgentMessage,
    FromOperatorMessage,
    OperatorReply,
    ToAgentMessage,
    Version,
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


class StorageSeen(ControllerEvent, frozen=True, kw_only=True):
    """What `LookIntoStorage` has found; there is an answer to each."""

    number: int
    """Of the look."""
    found: Restored | None = None
    """Every byte of it was compared with its checksum."""
    code: int = 0
    """Exit code of a job that was to start from something and can't; 0: it may begin anew."""
    reason: str = ""
    """Why nothing was found, or could be looked at."""


Event = FromAgent | AgentLinked | AgentUnlinked | FromOperator | StorageSeen | Tick


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


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Where a machine's agent lets others read the machine's own disk; port 0: it has not said."""

    machine: str
    host: str
    port: int


class LookIntoStorage(ControllerCommand, frozen=True, kw_only=True):
    """Choose a checkpoint among those on the storage of all and on these machines' disks.

    Done beside the decider; the answer is `StorageSeen` with the same number.
    """

    number: int
    is_start: bool
    """What the job starts from, as its command says; else the newest of this run."""
    disks: tuple[Disk, ...]
    left: tuple[tuple[int, int], ...] = ()
    """Step and generation of each way back: what lies behind that step and is older than that
    generation was left."""
    history: tuple[str, ...] = ()
    """Runs that this one continues, nearest first."""
    begun_at: Version = NO_VERSION
    """Where it began in the newest of them: what lies behind that it has left."""


Command = Append | ToAgent | ToOperator | PhaseReached | LookIntoStorage | EndJob
