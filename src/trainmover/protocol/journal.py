"""What the controller writes down before it acts; one entry per decision that must survive it.

Decides what a restarted controller knows: numbers, plans, commits, aborts, how the job ended, and
the finished reports of incidents. Deliberately not here: heartbeats, reports, readiness of
standbys - they are asked for again. A plan is journaled once; a planned one gets its target later
through `TargetFixed`, when the first rank has stopped at the flagged boundary.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainmover.protocol.messages import (
    ChannelCount,
    DiskPart,
    Facts,
    JobSpec,
    Mark,
    Plan,
    Tier,
    Traffic,
    Version,
)

# --------------------------------------------------------------------------- incident reports


class Culprit(msgspec.Struct, frozen=True, kw_only=True):
    """A worker or machine that was replaced or suspected, with why."""

    rank: int
    incarnation: str
    machine: str
    evidence: str


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """When a phase was reached, on the controller's clock, counted from the first sign."""

    name: str
    after_ns: int
    waited_for: str = ""
    """Who was waited for last, if anybody: the phases are the critical path."""


class RolePlayed(msgspec.Struct, frozen=True, kw_only=True):
    """Who plays one rank in the new generation, and what the cut-over did there."""

    rank: int
    machine: str
    incarnation: str
    before: str = ""
    """Incarnation that played the rank before; the same one for a stayer."""
    source: str = ""
    """What the rank was restored from: leaver, replica; increments (on top of a snapshot);
    snapshot (stayers too), checkpoint; fresh for a fresh start."""
    served_by: str = ""
    """Machine whose agent's memory it came from, of a snapshot."""
    adopted: str = ""
    role_class: str = ""
    """Digest of the class of roles the rank belongs to, where it is known."""
    bytes_received: int = 0
    channels: ChannelCount = ChannelCount()
    slowdown: float = 0.0
    """A joiner's: the job's median step while it rehearsed over that without; 0: not known."""


class RankMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Instants on one rank's own monotonic clock."""

    rank: int
    marks: tuple[Mark, ...]
    traffic: Traffic | None = None
    """What a stayer exchanged while it could not train."""


class IncidentReport(msgspec.Struct, frozen=True, kw_only=True):
    """One switchover from first sign to the first gate behind it."""

    number: int
    """Generation it ended in, or the number it was aborted under."""
    kind: Literal[
        "planned",
        "reconnect",
        "respawn",
        "standby",
        "rollback",
        "restored",
        "fresh_start",
        "aborted",
    ]
    """`rollback`: all ranks went back to a snapshot in memory; `restored`: to a checkpoint."""
    base_generation: int
    reason: str
    culprits: tuple[Culprit, ...] = ()
    phases: tuple[PhaseTime, ...] = ()
    roles: tuple[RolePlayed, ...] = ()
    marks: tuple[RankMarks, ...] = ()
    resumed_step: int = 0
    """Step at which the new generation started."""
    steps_repeated: int = 0
    """Steps some rank had begun and that were done again: 0 or 1; after a roll-back all since
    the snapshot."""
    outcome: str = ""


# --------------------------------------------------------------------------- records


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Root of all records; the class name is the tag."""


class TermTaken(Record, frozen=True, kw_only=True):
    """A controller's life has begun; written by the journal's compare-and-set."""

    term: int


class JobOpened(Record, frozen=True, kw_only=True):
    """First decision of a job."""

    spec: JobSpec


class MachinesChosen(Record, frozen=True, kw_only=True):
    """Machines that play ranks in the first generation, in rank order, and what all must equal."""

    machines: tuple[str, ...]
    facts: Facts = Facts()


class PlanRecorded(Record, frozen=True, kw_only=True):
    """`plan` is the only plan of its number."""

    plan: Plan


class TargetFixed(Record, frozen=True, kw_only=True):
    """The boundary at which the planned switchover `number` takes place."""

    number: int
    target: Version


class CommitRecorded(Record, frozen=True, kw_only=True):
    """Generation `number` is the job's."""

    number: int


class AbortRecorded(Record, frozen=True, kw_only=True):
    """Generation `number` will never be."""

    number: int
    reason: str


class IncidentOpened(Record, frozen=True, kw_only=True):
    """`number` has been given to a freeze; no plan exists yet."""

    number: int
    base_generation: int
    reason: str
    is_counted: bool = True
    """Whether it uses up one of `max_incidents`: a further freeze of one incident does not."""


class IncidentClosed(Record, frozen=True, kw_only=True):
    """The finished report."""

    report: IncidentReport


class IdentitiesKnown(Record, frozen=True, kw_only=True):
    """Identity of each rank's bulk state, by rank: who is whose replica."""

    identities: tuple[str, ...]


class MachineRetired(Record, frozen=True, kw_only=True):
    """The machine is not used any more in this job."""

    machine: str
    reason: str


class StartChosen(Record, frozen=True, kw_only=True):
    """The job starts from a checkpoint of an earlier run."""

    name: str
    version: Version
    run_id: str
    history: tuple[str, ...] = ()
    """Runs that this one continues, nearest first; none if the checkpoint was asked for by name."""
    disks: tuple[DiskPart, ...] = ()
    """What of it is taken from machines' own disks."""


class CheckpointBegun(Record, frozen=True, kw_only=True):
    """`number` has been given to a checkpoint; nothing of it counts yet."""

    number: int
    version: Version
    tier: Tier = "durable"


class CheckpointKept(Record, frozen=True, kw_only=True):
    """The checkpoint counts; of tier `durable`, a loss may be restored from it."""

    number: int
    """0: it was found by looking, its commit was never heard of."""
    version: Version
    name: str
    is_suspect: bool = False
    tier: Tier = "durable"
    disks: tuple[DiskPart, ...] = ()
    """Of one that was found: what of it is taken from machines' own disks."""


class CheckpointMissed(Record, frozen=True, kw_only=True):
    """The checkpoint does not exist there; training goes on, earlier ones are unharmed."""

    number: int
    version: Version
    reason: str
    tier: Tier = "durable"


class StopRequested(Record, frozen=True, kw_only=True):
    """The operator wants the job to stop at the next boundary."""


class NoticeRecorded(Record, frozen=True, kw_only=True):
    """A machine, or all of them, is about to be taken away; for people."""

    machines: tuple[str, ...]
    """Empty: the whole job."""
    grace_s: float
    choice: str
    """What is done in the time that is left, and why."""


class CompleteRecorded(Record, frozen=True, kw_only=True):
    """Every rank has done all steps."""

    generation: int
    step: int


class StoppedRecorded(Record, frozen=True, kw_only=True):
    """The job is over for one reason."""

    code: int
    reason: str


AnyRecord = (
    TermTaken
    | JobOpened
    | MachinesChosen
    | PlanRecorded
    | TargetFixed
    | CommitRecorded
    | AbortRecorded
    | IncidentOpened
    | IncidentClosed
    | IdentitiesKnown
    | MachineRetired
    | StartChosen
    | CheckpointBegun
    | CheckpointKept
    | CheckpointMissed
    | StopRequested
    | NoticeRecorded
    | CompleteRecorded
    | StoppedRecorded
)


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One record with its place; `at_ns` is the writer's clock, for people only."""

    sequence: int
    term: int
    at_ns: int
    record: AnyRecord


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def encode_record(record: AnyRecord) -> bytes:
    """Bytes of one record."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> AnyRecord:
    """The record in `data`. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)
