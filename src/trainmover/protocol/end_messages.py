"""Orders of the controller to workers that end something: a role, a job, a process."""

from __future__ import annotations

from trainmover.protocol.carried import Message


class Release(Message, frozen=True, kw_only=True):
    """The leaver's state is needed no more: leave."""

    term: int
    number: int


class Fence(Message, frozen=True, kw_only=True):
    """Not a member any more: touch nothing, end."""

    term: int
    generation: int
    reason: str


class Complete(Message, frozen=True, kw_only=True):
    """Every rank has finished (journaled): `main` may return, the process may end."""

    term: int


class StopAtBoundary(Message, frozen=True, kw_only=True):
    """Carry a stop request in the next gate."""

    term: int


class StopNow(Message, frozen=True, kw_only=True):
    """End at once with `code`."""

    term: int
    code: int
    reason: str
