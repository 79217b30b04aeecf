"""Everything that belongs to one generation and ends with it.

Sequence numbers, ports, works under way, gates: a new generation starts with none of them, so
nothing of an old one can be taken for its own (protocol.md I7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from trainmover.communicator.call import describe_check
from trainmover.communicator.frames import Header
from trainmover.communicator.gate import Gates
from trainmover.communicator.operation import Operation
from trainmover.communicator.ports import Port
from trainmover.errors import CollectiveMismatch
from trainmover.topology import Membership

if TYPE_CHECKING:
    from trainmover.communicator.call import Call
    from trainmover.communicator.channel import Channel


class GenerationOwner(Protocol):
    """What a generation asks of the communicator; called under the lock."""

    def want_channel(self, generation: Generation, rank: int) -> None:
        """Open a channel to `rank` lazily."""

    def mismatch(self, error: CollectiveMismatch) -> None:
        """Report that ranks called different collectives."""


class Generation:
    """One membership in use (or prepared) by this rank."""

    def __init__(self, membership: Membership, rank: int, owner: GenerationOwner) -> None:
        self.number = membership.generation
        self.membership = membership
        self.rank = rank
        self.owner = owner
        self.ports: dict[int, Port] = {
            member.rank: Port(self, member.rank, member.incarnation)
            for member in membership.members
            if member.rank != rank
        }
        self.rank_by_incarnation = {m.incarnation: m.rank for m in membership.members}
        self.sequences: dict[int, int] = {}
        self.sent_counts: dict[tuple[int, int, int], int] = {}
        self.received_counts: dict[tuple[int, int, int], int] = {}
        self.active: dict[tuple[int, int, int], Operation] = {}
        self.called_elsewhere: dict[tuple[int, int, int], tuple[int, Port]] = {}
        """Collectives not called here yet: as what (its check), and by whom, one of those."""
        self.any_source: dict[tuple[int, int], deque[tuple[Operation, Callable[[int], None]]]] = {}
        self.sends: set[Operation] = set()
        self.gates = Gates(rank, membership.world_size)
        self.edges: dict[tuple[str, str], None] = {}
        self.is_broken = False
        self.is_committed = False
        self.was_contacted = False
        self.required: set[int] = set()
        self.marks_missing: set[str] = set()
        self.wanted: set[int] = set()
        self._has_mismatch = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.membership.world_size

    def port(self, rank: int) -> Port:
        """This rank's end towards `rank`."""
        return self.ports[rank]

    def port_of(self, incarnation: str) -> Port | None:
        """This rank's end towards an incarnation, if it is a (foreign) member."""
        rank = self.rank_by_incarnation.get(incarnation)
        return None if rank is None else self.ports.get(rank)

    def inherit(self, channels: Mapping[str, Channel], *, only_new: bool) -> None:
        """Use the channels that are open already; only those opened for this one if asked."""
        for port in self.ports.values():
            channel = channels.get(port.peer)
            is_new = channel is not None and channel.opened_for >= self.number
            port.channel = channel if is_new or not only_new else None

    def want(self, port: Port) -> None:
        """A port without a channel is used: open one, once."""
        if port.rank not in self.wanted:
            self.wanted.add(port.rank)
            self.owner.want_channel(self, port.rank)

    # -- numbering -----------------------------------------------------------

    def next_sequence(self, group: int) -> int:
        """Number of the next collective of a group."""
        number = self.sequences.get(group, 0)
        self.sequences[group] = number + 1
        return number

    def next_sent(self, group: int, tag: int, rank: int) -> int:
        """Number of the next send to `rank` under `tag`."""
        number = self.sent_counts.get((group, tag, rank), 0)
        self.sent_counts[group, tag, rank] = number + 1
        return number

    def next_received(self, group: int, tag: int, rank: int) -> int:
        """Number of the next receive from `rank` under `tag`."""
        number = self.received_counts.get((group, tag, rank), 0)
        self.received_counts[group, tag, rank] = number + 1
        return number

    # -- works under way -----------------------------------------------------

    def enlist(self, operation: Operation) -> None:
        """Know a work until it completes."""
        if operation.call.is_point_to_point:
            self.sends.add(operation)
        else:
            key = (operation.call.group.id, 0, operation.sequence)
            self.active[key] = operation
            check, port = self.called_elsewhere.pop(key, (operation.call.check, None))
            if port is not None and check != operation.call.check:
                self.report_mismatch(operation, port, check)

    def note_call(self, header: Header, port: Port) -> None:
        """A message of a collective that nobody has called here yet."""
        key = (header.group, 0, header.sequence)
        if not header.tag and key not in self.active:
            self.called_elsewhere.setdefault(key, (header.check, port))

    def retire(self, operation: Operation) -> None:
        """A work has completed."""
        if operation.call.is_point_to_point:
            self.sends.discard(operation)
        else:
            self.active.pop((operation.call.group.id, 0, operation.sequence), None)

    def outstanding(self) -> list[Operation]:
        """Works that have not completed, oldest first."""
        works = [*self.active.values(), *self.sends]
        return sorted(works, key=lambda operation: operation.started_at)

    # -- receives from anybody -----------------------------------------------

    def await_any(
        self, group: int, tag: int, operation: Operation, start: Callable[[int], None]
    ) -> None:
        """`start(rank)` once with the first rank whose next message under `tag` is here."""
        for rank, port in self.ports.items():
            if rank not in operation.call.group.ranks:
                continue
            expected = self.received_counts.get((group, tag, rank), 0)
            if (group, tag, expected, 0) in port.unexpected:
                start(rank)
                return
            if port.channel is None:
                self.want(port)
        self.any_source.setdefault((group, tag), deque()).append((operation, start))

    def claim(self, port: Port, header: Header) -> bool:
        """Give an unasked message to a waiting receive-from-anybody; True if it was taken."""
        waiting = self.any_source.get((header.group, header.tag))
        expected = self.received_counts.get((header.group, header.tag, port.rank), 0)
        if not waiting or header.sequence != expected or header.slot != 0:
            return False
        _, start = waiting.popleft()
        if not waiting:
            del self.any_source[header.group, header.tag]
        start(port.rank)
        return True

    # -- failure -------------------------------------------------------------

    def report_mismatch(self, operation: Operation, port: Port, check: int) -> None:
        """Name both calls, once per generation: everything behind the first is its echo."""
        if self._has_mismatch or self.is_broken:
            return
        self._has_mismatch = True
        call: Call = operation.call
        self.owner.mismatch(
            CollectiveMismatch(
                f"ranks called different collectives in group {call.group.name!r} at number "
                f"{operation.sequence}: rank {self.rank} called {describe_check(call.check)}, "
                f"rank {port.rank} called {describe_check(check)}; every rank of a group must "
                "make the same calls in the same order"
            )
        )

    def clear(self) -> None:
        """Free what is kept for this generation."""
        for port in self.ports.values():
            port.clear()
        self.called_elsewhere.clear()
        self.any_source.clear()
