"""Two-phase change of generation: prepare, cut over, then commit or abort.

Decides which channels a generation needs, which are inherited as they are, and when both phases
are complete. Invariants: a channel between two stayers is the same object and socket in the next
generation; nothing the training loop sees changes before `cut_over`; until `commit` the old
generation can come back with none of its frames lost.

All methods run under the engine's lock, on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainmover.communicator import handshake as hs
from trainmover.communicator.channel import Channel
from trainmover.communicator.engine import Engine, Timer
from trainmover.communicator.frames import HEADER, FrameType
from trainmover.communicator.generation import Generation, GenerationOwner
from trainmover.communicator.mesh import Mesh
from trainmover.communicator.outbox import Outbox
from trainmover.communicator.ports import OutFrame
from trainmover.communicator.schedules import hypercube_partners
from trainmover.communicator.settings import ChannelCount, CommunicatorConfig, CommunicatorEvents
from trainmover.errors import GenerationMismatch, LocalProtocolError
from trainmover.topology import Membership
from trainmover.topology.membership import backups_of, gate_peers, wards_of


def core_partners(membership: Membership, rank: int) -> frozenset[int]:
    """Ranks that `rank` has a channel to from the start; symmetric."""
    size = membership.world_size
    partners = set(hypercube_partners(rank, size)) if size > 1 else set()
    for pair in gate_peers(rank, size):
        partners.update(pair)
    partners.update(backups_of(rank, membership))
    partners.update(wards_of(rank, membership))
    partners.discard(rank)
    return frozenset(partners)


class Succession:
    """The current generation, the one being prepared, and the one just left."""

    def __init__(
        self,
        engine: Engine,
        outbox: Outbox,
        events: CommunicatorEvents,
        config: CommunicatorConfig,
        owner: GenerationOwner,
    ) -> None:
        self.current: Generation | None = None
        self.prepared: Generation | None = None
        self.previous: Generation | None = None
        self.floor = 0
        """Generations up to here are over: refused at the door, dropped in streams."""
        self.mesh: Mesh
        self._engine = engine
        self._outbox = outbox
        self._events = events
        self._config = config
        self._owner = owner
        self._knocks: dict[str, int] = {}
        self._timer: Timer | None = None
        self._was_prepared_said = False
        self._was_cut_over_said = False
        self._count = ChannelCount(0, 0, 0)

    def alive(self) -> Iterator[Generation]:
        """Generations whose frames are taken."""
        for generation in (self.current, self.prepared, self.previous):
            if generation is not None:
                yield generation

    def find(self, number: int) -> Generation | None:
        """A generation by number."""
        for generation in self.alive():
            if generation.number == number:
                return generation
        return None

    def newest(self) -> int:
        """Highest generation known here."""
        return max((generation.number for generation in self.alive()), default=self.floor)

    def _say(self, fn: Callable[[], None]) -> None:
        self._outbox.event(fn)

    # -- phase one -----------------------------------------------------------

    def prepare(self, membership: Membership, rank: int) -> Generation | None:
        """Open what `membership` needs; None where this is already under way or done."""
        number = membership.generation
        if self.find(number) is not None:
            return None
        if number <= max(self.floor, self.current.number if self.current else 0):
            raise GenerationMismatch(
                f"generation {number} can't be prepared: this rank is at "
                f"{self.current.number if self.current else self.floor}"
            )
        if self.prepared is not None:
            self._drop_prepared(keep=membership)
        generation = Generation(membership, rank, self._owner)
        generation.required = set(core_partners(membership, rank))
        generation.required |= self._replaced(membership)
        self.prepared = generation
        self._was_prepared_said = False
        generation.inherit(self.mesh.channels, only_new=self._opens_all)
        ports = generation.ports.values()
        generation.required |= {p.rank for p in ports if self._knocks.get(p.peer, 0) == number}
        for rank_ in sorted(generation.required):
            self._open(generation, rank_)
        self._arm(self._config.connect_timeout_s, lambda: self._prepare_late(generation))
        return generation

    def _replaced(self, membership: Membership) -> set[int]:
        """Ranks whose channel with us can't be inherited."""
        if self.current is None or self.current.world_size != membership.world_size:
            return set()
        return {
            port.rank
            for port in self.current.ports.values()
            if port.channel is not None
            and (self._opens_all or membership.members[port.rank].incarnation != port.peer)
        }

    @property
    def _opens_all(self) -> bool:
        is_broken = self.current is not None and self.current.is_broken
        return is_broken and not self._config.does_reuse_channels

    def _open(self, generation: Generation, rank: int) -> None:
        port = generation.ports[rank]
        if port.channel is not None:
            return
        member = generation.membership.members[rank]
        if generation.rank < rank:
            self.mesh.connect(member, generation.number)
            return
        is_expected = rank in core_partners(generation.membership, generation.rank)
        is_stayer = self.current is not None and self.current.port_of(port.peer) is not None
        if not is_expected or is_stayer:  # the lower rank can't know that we miss it
            self.mesh.connect(member, generation.number, hs.PURPOSE_KNOCK)

    def check_prepared(self) -> None:
        """Say `prepared` once all required channels are open."""
        generation = self.prepared
        if generation is None or self._was_prepared_said:
            return
        if all(generation.ports[rank].channel is not None for rank in generation.required):
            self._was_prepared_said = True
            self._disarm()
            number = generation.number
            self._say(lambda: self._events.prepared(number))

    def _prepare_late(self, generation: Generation) -> None:
        if self.prepared is generation and not self._was_prepared_said:
            for rank in sorted(generation.required):
                port = generation.ports[rank]
                if port.channel is None:
                    self.fail_prepare(port.peer, self._late_text(generation, rank))
                    return

    def _late_text(self, generation: Generation, rank: int) -> str:
        theirs, own = generation.membership.members[rank], self.mesh.address[0]
        return (
            f"no channel between {own} and rank {rank} at {theirs.host} after "
            f"{self._config.connect_timeout_s:g} s; if machines should talk over another "
            "interface, name each one's address there with `trainmover agent --host`"
        )

    def fail_prepare(self, peer: str, reason: str) -> None:
        """A channel of the prepared generation can't be had."""
        if self.prepared is not None:
            number = self.prepared.number
            self._disarm()
            self._say(lambda: self._events.prepare_failed(number, peer, reason))

    def knocked(self, peer: str, number: int) -> None:
        """A higher rank misses its channel to us."""
        self._knocks[peer] = number
        stale = self.mesh.channels.get(peer)
        if stale is not None and stale.opened_for < number:
            stale.fail("the peer has lost this connection")
        for generation in self.alive():
            port = generation.port_of(peer)
            if generation.number == number and port is not None and port.channel is None:
                generation.required.add(port.rank)
                port.is_dead = False
                self._open(generation, port.rank)

    # -- phase two -----------------------------------------------------------

    def cut_over(self, number: int) -> Generation | None:
        """Send in `number` from now on; None where that is already so."""
        if self.current is not None and self.current.number == number:
            return None
        generation = self.prepared
        if generation is None or generation.number != number or not self._was_prepared_said:
            raise LocalProtocolError(
                f"cut_over({number}) without a completed prepare; prepared is "
                f"{generation.number if generation else None}"
            )
        self.previous, self.current, self.prepared = self.current, generation, None
        self._was_cut_over_said = False
        inherited = opened = 0
        for port in generation.ports.values():
            channel = port.channel
            if channel is None:
                continue
            if channel.opened_for >= number:
                opened += 1
                continue
            inherited += 1
            self._mark(channel, number)
            if number not in channel.marks:
                generation.marks_missing.add(channel.peer)
        self._count = ChannelCount(inherited, opened, len(self._foreign(generation)))
        self._arm(self._config.cut_over_timeout_s, lambda: self._cut_over_late(generation))
        self.check_cut_over()
        return generation

    def _mark(self, channel: Channel, number: int) -> None:
        header = HEADER.pack(FrameType.MARK, 0, 0, 0, number, 0, 0, 0, 0, 0)
        channel.send(OutFrame(header, b"", number))

    def _foreign(self, generation: Generation) -> list[Channel]:
        """Channels to incarnations that play no rank in `generation`."""
        return [
            channel
            for peer, channel in self.mesh.channels.items()
            if generation.port_of(peer) is None
        ]

    def marked(self, channel: Channel, number: int) -> None:
        """The peer has cut over to `number`; what follows in its stream is not older."""
        channel.marks = {mark for mark in channel.marks if mark > self.floor} | {number}
        if self.current is not None and self.current.number == number:
            self.current.marks_missing.discard(channel.peer)
            self.check_cut_over()

    def check_cut_over(self) -> None:
        """Say `cut_over_done` once every inherited stream is flushed."""
        generation = self.current
        if generation is None or generation.is_committed or self._was_cut_over_said:
            return
        if not generation.marks_missing:
            self._was_cut_over_said = True
            self._disarm()
            number, count = generation.number, self._count
            self._say(lambda: self._events.cut_over_done(number, count))

    def _cut_over_late(self, generation: Generation) -> None:
        if self.current is generation and not self._was_cut_over_said:
            peer = sorted(generation.marks_missing)[0]
            timeout_s = self._config.cut_over_timeout_s
            self.fail_cut_over(peer, f"has not cut over after {timeout_s} s")

    def fail_cut_over(self, peer: str, reason: str) -> None:
        """The current, uncommitted generation can't be completed."""
        if self.current is not None:
            number = self.current.number
            self._disarm()
            self._say(lambda: self._events.cut_over_failed(number, peer, reason))

    # -- the end -------------------------------------------------------------

    def commit(self, number: int) -> Generation | None:
        """`number` is the membership; returns the generation to be freed, if any."""
        generation = self.current
        if generation is None or generation.number != number:
            raise LocalProtocolError(
                f"commit({number}) but this rank is in generation "
                f"{generation.number if generation else None}"
            )
        old, self.previous = self.previous, None
        if generation.is_committed:
            return None
        generation.is_committed = True
        generation.marks_missing.clear()
        self.floor = number
        self._disarm()
        for channel in self._foreign(generation):
            self.mesh.give_up(channel.peer)
            if not (self.prepared and self.prepared.port_of(channel.peer)):
                self.mesh.close_channel(channel)
        for channel in self.mesh.channels.values():
            channel.early = [item for item in channel.early if item[0].generation > number]
        self._knocks = {peer: at for peer, at in self._knocks.items() if at > number}
        return old

    def abort(self, number: int) -> Generation | None:
        """Give `number` up; returns the generation to be freed, if any."""
        if self.prepared is not None and self.prepared.number == number:
            return self._drop_prepared(keep=None)
        generation = self.current
        if generation is None or generation.number != number:
            return None  # aborted before, or never heard of
        if generation.is_committed:
            raise LocalProtocolError(f"abort({number}) after its commit")
        self.current, self.previous = self.previous, None
        self._disarm()
        self._close_only(generation, None)
        return generation

    def _drop_prepared(self, keep: Membership | None) -> Generation | None:
        generation, self.prepared = self.prepared, None
        self._disarm()
        if generation is not None:
            self._close_only(generation, keep)
            generation.clear()
        return generation

    def _close_only(self, generation: Generation, keep: Membership | None) -> None:
        """Close channels that only `generation` has a use for."""
        kept = {member.incarnation for member in keep.members} if keep is not None else set()
        for port in generation.ports.values():
            is_used = port.peer in kept or (
                self.current is not None and self.current.port_of(port.peer) is not None
            )
            if is_used:
                continue
            self.mesh.give_up(port.peer)
            if port.channel is not None:
                self.mesh.close_channel(port.channel)

    # -- what the mesh reports -----------------------------------------------

    def established(self, channel: Channel) -> None:
        """A channel is open: every generation its peer plays in uses it."""
        for generation in self.alive():
            port = generation.port_of(channel.peer)
            if port is not None and not generation.is_broken:
                port.is_dead = False
                port.attach(channel)
        if self.current is not None and channel.opened_for < self.current.number:
            self._mark(channel, self.current.number)
        if not any(generation.port_of(channel.peer) for generation in self.alive()):
            self._engine.call_later(self._config.parked_timeout_s, lambda: self._unpark(channel))
        self.check_prepared()

    def _unpark(self, channel: Channel) -> None:
        with self._engine.lock:
            if not any(generation.port_of(channel.peer) for generation in self.alive()):
                self.mesh.close_channel(channel)

    def refusal(self, hello: hs.Hello) -> str | None:
        """Why a caller's generation or incarnation is not welcome."""
        if hello.generation < self.floor:
            return f"generation {hello.generation} is over; this rank is in {self.floor}"
        generation = self.find(hello.generation)
        if generation is None and hello.generation <= self.newest():
            return f"generation {hello.generation} is unknown here"
        if generation is not None and generation.port_of(hello.dialler) is None:
            return f"{hello.dialler} plays no rank in generation {hello.generation}"
        return None

    def lost(self, channel: Channel, reason: str) -> None:
        """A channel broke: say to whom it matters, and how."""
        peer, current, prepared = channel.peer, self.current, self.prepared
        for generation in self.alive():
            port = generation.port_of(peer)
            if port is not None and port.channel is channel:
                port.channel = None
                port.is_dead = generation is not prepared
                generation.wanted.discard(port.rank)
        if current is not None and current.port_of(peer) is not None:
            number = current.number
            if not current.is_committed and channel.opened_for >= number:
                self.fail_cut_over(peer, reason)
            else:  # also where it is broken already: nobody need wait for this peer's report
                self._say(lambda: self._events.channel_broken(number, peer, reason))
        if prepared is None or prepared.port_of(peer) is None:
            return
        if channel.opened_for >= prepared.number:
            self.fail_prepare(peer, reason)
        elif not self._opens_all:  # it would have been inherited: open a new one instead
            rank = prepared.rank_by_incarnation[peer]
            prepared.required.add(rank)
            self._was_prepared_said = False
            self._open(prepared, rank)

    # -- timers --------------------------------------------------------------

    def _arm(self, delay_s: float, fn: Callable[[], None]) -> None:
        self._disarm()

        def fire() -> None:
            with self._engine.lock:
                fn()
            self._outbox.drain()

        self._timer = self._engine.call_later(delay_s, fire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
