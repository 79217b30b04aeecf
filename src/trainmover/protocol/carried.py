"""What messages carry: versions, plans, sources, facts. Values without behaviour."""

from __future__ import annotations

from typing import Literal

import msgspec

from trainmover.topology import Member, Membership


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Root of all messages; the class name is the tag on the wire."""


class Version(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """State of a rank entering step `step`; lineage: generation in which gate step-1 passed."""

    step: int
    lineage: int = 0


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that failed, as one end saw it."""

    peer: str
    """Incarnation at the other end."""
    reason: str


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a joiner gets the state of its rank."""

    rank: int
    bulk_from: str
    """Incarnation of the leaver or of a live replica."""
    own_from: str
    """Incarnation that holds the rank's own personal state: the leaver or a backup."""
    shared_from: str
    """Incarnation of any stayer (or the leaver) at the target version."""
    kind: Literal["leaver", "replica", "snapshot", "increments"]
    """`snapshot`: all of it from an agent's memory; then `machine`, `host` and `port` name it.
    `increments`: bulk from there too, of version `base`, and the updates since from `bulk_from`."""
    machine: str = ""
    host: str = ""
    port: int = 0
    base: Version | None = None


class DiskPart(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a checkpoint on one machine's own disk, which that machine's agent hands out."""

    machine: str
    folder: str
    """Directory of the local tier: the name that the machine had when they were written."""
    ranks: tuple[int, ...]
    """Whose files are taken from there."""
    host: str = ""
    port: int = 0
    """Where the agent serves them now; 0: nobody has said."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A switchover from `base_generation` to generation `number`; never changes once journaled."""

    number: int
    kind: Literal["form", "planned", "unplanned"]
    base_generation: int
    target: Version
    membership: Membership
    """Its generation equals `number`."""
    leavers: tuple[str, ...] = ()
    leaver_members: tuple[Member, ...] = ()
    """Planned leavers with their old ranks and addresses: joiners fetch state from them."""
    joiners: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    """One per joiner; empty when `is_fresh_start`."""
    result: tuple[int, ...] = ()
    """Merged gate flags of step target-1, for ranks that are held at that gate."""
    attempts: int = 0
    """Most attempts of a step any stayer has started so far; ranks with fewer run out the
    difference while DDP's buckets are not settled yet (facts: DDP rebuilds them once)."""
    is_fresh_start: bool = False
    """Nobody has state worth keeping: every member enters `main` anew (formation, or a loss
    while `main` was still building)."""
    is_rollback: bool = False
    """No live source for some rank at the newest version: every member, stayers too, loads the
    snapshot of `target` that its source names (one source per rank, all of kind `snapshot`)."""
    restore: str = ""
    """Fresh start only: checkpoint (name inside the store) that each member loads at its first
    boundary; empty: from step 0."""
    disks: tuple[DiskPart, ...] = ()
    """Of that checkpoint: parts on machines' own disks, for members on other machines."""
    reason: str = ""
    renews_buckets: bool = False
    """Members may stand at different bucket layouts of DDP: all start over at the target."""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Personal state of `owner_rank` held by the reporting worker."""

    owner_rank: int
    version: Version
    is_final: bool
    """False where the owner changes own leaves after its gate and only the gate copy is held."""
    replay_from: Version | None = None
    """Every update of the owner from this version to `version` is held, too (snapshot.increments);
    None: not all, or none."""


class ChannelCount(msgspec.Struct, frozen=True, kw_only=True):
    """What a cut-over did to one worker's channels."""

    inherited: int = 0
    opened: int = 0
    closed: int = 0


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker exchanged between its stop and the commit of a switchover."""

    messages_sent: int = 0
    """To the controller; one that was sent again counts once."""
    messages_received: int = 0
    messages_repeated: int = 0
    """Sent or received once more because an answer was late."""
    frames_sent: int = 0
    """On channels: marks that flush them, and personal state for the backups."""
    bytes_sent: int = 0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A named instant on the sender's own monotonic clock."""

    name: str
    at_ns: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on all machines for the numbers to be equal, and what should be."""

    must_equal: tuple[tuple[str, str], ...] = ()
    should_equal: tuple[tuple[str, str], ...] = ()


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs to launch workers."""

    job: str
    run_id: str
    script: str
    arguments: tuple[str, ...] = ()
    world_size: int
    workers_per_machine: int
    environment: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    """Flattened configuration (``worker.gate_timeout_s`` -> ``5.0``) for agents and workers."""
    working_directory: str = ""
    log_directory: str = ""


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to start."""

    incarnation: str
    local_rank: int
    machine: str


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its agent sees it; sent with each heartbeat and on (re-)registration."""

    incarnation: str
    local_rank: int
    pid: int
    generation: int = 0
    step: int = -1
    gate: int = -1
    """Last gate passed: proof of life."""
    phase: str = ""
    process_state: str = ""
    """One letter of the operating system: R, S, D, T (stopped), Z."""
    last_collective: str = ""
