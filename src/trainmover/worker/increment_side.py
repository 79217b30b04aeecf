"""The process's side of increments: to the backup that holds them, from a peer, to a joiner.

Decides which rank holds them (the nearest backup, on another machine), how they are cut into
control frames, and what a new holder is sent. They travel in front of personal state on the same
channel, so whoever holds the one holds the other: no gate passes whose update is not held (protocol
W3, I8).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from trainmover.errors import RemoteProtocolError, StateMismatch, TransportError
from trainmover.protocol.messages import Plan, Source, Version
from trainmover.state.increment import IncrementHead, decode_head, encode_head
from trainmover.topology import Membership
from trainmover.topology.membership import backups_of, wards_of
from trainmover.worker.increment_store import Increment, IncrementStore
from trainmover.worker.personal import INCREMENT, INCREMENT_BYTES
from trainmover.worker.streams import LENGTH, exactly

if TYPE_CHECKING:
    from trainmover.topology.keeping import SnapshotConfig
    from trainmover.worker.runtime import Runtime

PIECE_BYTES: Final = 1 << 22
HEAD_LIMIT_BYTES: Final = 1 << 26
BULK_LIMIT_BYTES: Final = 1 << 40


class _Arriving:
    """Increment of a peer whose bytes are on their way."""

    def __init__(self, generation: int, increment: Increment) -> None:
        self.generation = generation
        self.increment = increment
        self.filled = 0


class IncrementSide:
    """One per process."""

    def __init__(self, runtime: Runtime, config: SnapshotConfig) -> None:
        self.config = config
        self.store = IncrementStore(config.increments_kept)
        self._runtime = runtime
        self._arriving: dict[int, _Arriving] = {}
        self._holder = ""
        """Incarnation that holds our increments in the generation we run in."""

    # ------------------------------------------------------------------ main thread: sending

    def must_ship(self, rank: int, replicas: tuple[int, ...]) -> bool:
        """Whether `rank` is to back up its steps: it has a backup, and no replica elsewhere."""
        membership = self._runtime.membership
        if membership is None or holder_of(rank, membership) is None:
            return False
        if self.config.always_ships:
            return True
        machine = membership.members[rank].machine
        return all(membership.members[other].machine == machine for other in replicas)

    def ship(self, increment: Increment) -> None:
        """To the holder, in front of personal state; kept here too."""
        membership = self._runtime.membership
        assert membership is not None
        self.store.add(increment)
        to_rank = holder_of(increment.head.owner_rank, membership)
        if to_rank is not None:
            self._send(to_rank, increment)

    def void(self, rank: int) -> None:
        """What was sent before can't be played: the holder forgets it."""
        membership = self._runtime.membership
        self.store.void(rank)
        to_rank = None if membership is None else holder_of(rank, membership)
        if to_rank is not None:
            nowhere = Version(step=0)
            head = IncrementHead(owner_rank=rank, base=nowhere, version=nowhere, is_void=True)
            self._send(to_rank, Increment(head, None))

    def _send(self, to_rank: int, increment: Increment) -> None:
        send, step = self._runtime.communicator.send_control, increment.head.version.step
        send(to_rank, INCREMENT, step, encode_head(increment.head))
        bulk = increment.bulk
        for start in range(0, len(bulk), PIECE_BYTES):
            send(to_rank, INCREMENT_BYTES, step, bulk[start : start + PIECE_BYTES])

    # ------------------------------------------------------------------ I/O thread: holding

    def arrived(self, from_rank: int, kind: int, generation: int, payload: bytes) -> None:
        """A control frame with a head, or with bytes behind one. Raises RemoteProtocolError."""
        if kind == INCREMENT:
            self._begin(from_rank, generation, payload)
            return
        arriving = self._arriving.get(from_rank)
        if arriving is None or arriving.generation != generation:
            return  # the rest of one that was cut short with its generation
        end = arriving.filled + len(payload)
        if end > arriving.increment.head.bulk_bytes:
            raise RemoteProtocolError(f"rank {from_rank} sent more of an increment than announced")
        arriving.increment.bulk[arriving.filled : end] = payload
        arriving.filled = end
        self._end(from_rank, arriving)

    def _begin(self, from_rank: int, generation: int, payload: bytes) -> None:
        old = self._arriving.pop(from_rank, None)
        if old is not None:
            self.store.give_back(old.increment.block)
        try:
            head = decode_head(payload)
        except StateMismatch as error:
            raise RemoteProtocolError(str(error)) from error
        if head.owner_rank != from_rank or not 0 <= head.bulk_bytes <= BULK_LIMIT_BYTES:
            raise RemoteProtocolError(f"rank {from_rank} sent an impossible increment")
        if head.is_void:
            self.store.void(from_rank)
            return
        block = self.store.reserve(head.bulk_bytes) if head.bulk_bytes else None
        arriving = _Arriving(generation, Increment(head, block))
        self._arriving[from_rank] = arriving
        self._end(from_rank, arriving)

    def _end(self, from_rank: int, arriving: _Arriving) -> None:
        if arriving.filled == arriving.increment.head.bulk_bytes:
            del self._arriving[from_rank]
            self.store.add(arriving.increment)

    def renew(self, plan: Plan, rank: int) -> None:
        """Finding 7: who backs us up in the plan's generation holds our updates, too.

        Not in a planned switchover, which would stand still for it: a snapshot follows its commit.
        """
        to_rank = holder_of(rank, plan.membership)
        if not self.config.ships_increments or to_rank is None or plan.kind == "planned":
            return
        holder = plan.membership.members[to_rank].incarnation
        source = next((s for s in plan.sources if s.rank == rank), None)
        if holder == self._holder or (source is not None and source.bulk_from == holder):
            return  # it has them already
        for increment in self.store.line(rank):
            if increment.head.version.step <= plan.target.step:
                self._send(to_rank, increment)

    def committed(self, membership: Membership, rank: int, target_step: int) -> None:
        """Run in another generation."""
        to_rank = holder_of(rank, membership)
        self._holder = "" if to_rank is None else membership.members[to_rank].incarnation
        self.store.drop_above(target_step)
        self.store.keep_only({rank, *wards_of(rank, membership)})

    # ------------------------------------------------------------------ to a joiner

    def fetching(self, plan: Plan, rank: int) -> AbstractContextManager[Iterator[Increment]]:
        """Joiner: the updates that lead `rank` to the plan's target."""
        return self._runtime.exchange.increments(plan, rank)

    def serve(self, stream: socket.socket, place: str) -> None:
        """On a thread: what a joiner asks for with `place_of`. Raises StateMismatch."""
        owner, base_step, base_lineage, step, lineage = (int(word) for word in place.split(":"))
        base = Version(step=base_step, lineage=base_lineage)
        path = self.store.path(owner, base, Version(step=step, lineage=lineage))
        stream.sendall(LENGTH.pack(len(path)))
        for increment in path:
            head = encode_head(increment.head)
            stream.sendall(LENGTH.pack(len(head)) + head)
            stream.sendall(increment.bulk)

    def read(self, stream: socket.socket) -> Increment:
        """Joiner, main thread: the next one. Raises TransportError, StateMismatch."""
        (size,) = LENGTH.unpack(exactly(stream, LENGTH.size))
        if not 0 < size <= HEAD_LIMIT_BYTES:
            raise StateMismatch(f"the head of an increment has {size} bytes")
        head = decode_head(exactly(stream, size))
        if not 0 <= head.bulk_bytes <= BULK_LIMIT_BYTES:
            raise StateMismatch(f"an increment of {head.bulk_bytes} bytes was announced")
        block = self.store.reserve(head.bulk_bytes) if head.bulk_bytes else None
        increment = Increment(head, block)
        view = increment.bulk
        at = 0
        while at < len(view):
            try:
                count = stream.recv_into(view[at:])
            except OSError as error:
                raise TransportError(f"an increment's stream broke: {error}") from error
            if count == 0:
                raise TransportError("an increment's stream ended too soon")
            at += count
        return increment


def place_of(source: Source, target: Version) -> str:
    """What a joiner asks the holder of its increments for."""
    base = source.base
    if base is None:
        raise StateMismatch(f"the plan names no snapshot for rank {source.rank} to begin at")
    return f"{source.rank}:{base.step}:{base.lineage}:{target.step}:{target.lineage}"


def holder_of(rank: int, membership: Membership) -> int | None:
    """Who holds the increments of `rank`: its nearest backup on another machine."""
    return next(iter(backups_of(rank, membership)), None)
