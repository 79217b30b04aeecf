"""Messages about recordings, role classes and what a rehearsal has not seen."""

from __future__ import annotations

import msgspec

from trainmover.protocol.carried import Message
from trainmover.topology import Member


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """One role class a standby is to walk through."""

    role_class: str
    as_rank: int
    """The rank it plays meanwhile."""
    ranks: tuple[int, ...]
    """All ranks of the class."""
    fingerprint: str
    file: str
    """Recording in the durable store, as the keeper sees it."""
    bytes: int = 0
    keeper: Member | None = None
    """Who can serve the file where this machine does not see it."""
    neighbours: tuple[str, ...] = ()
    """Workers of the standby's machine, by local rank, that rehearse at the same time as the ranks
    beside this one; none: alone."""


class Uncovered(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened for the first time after the cut-over."""

    kind: str
    """recompilation, collective, module, or entry (`main` entered again)."""
    what: str
    step: int
    ms: float


# --------------------------------------------------------------------------- worker -> controller


class RoleClass(Message, frozen=True, kw_only=True):
    """The first iteration of this rank is known: what class of roles it belongs to."""

    incarnation: str
    rank: int
    fingerprint: str
    digest: str
    bytes: int
    """Crossing bytes it holds until it is told who keeps them; -1: it holds nothing."""
    file: str = ""
    """A recording of the class that an earlier run of the same fingerprint has left."""


class RecordingStored(Message, frozen=True, kw_only=True):
    """The keeper of a class has written its recording, or can't."""

    incarnation: str
    fingerprint: str
    role_class: str
    file: str
    bytes: int
    reason: str = ""
    """Why there is none; empty: there is."""


class Coverage(Message, frozen=True, kw_only=True):
    """What a joiner's rehearsal had not seen, so far. Not for the decider."""

    incarnation: str
    rank: int
    generation: int
    step: int
    parts: tuple[Uncovered, ...] = ()
    is_final: bool = False


# --------------------------------------------------------------------------- controller -> worker


class KeepRecording(Message, frozen=True, kw_only=True):
    """Write your recording (the keeper of its class), or let go of it (everyone else)."""

    term: int
    fingerprint: str
    role_class: str
    ranks: tuple[int, ...]
    is_keeper: bool
