"""Where arriving frames go, and what broken channels mean: the communicator's receiving half.

Decides nothing about membership: finds the generation a frame belongs to and passes on what it
says. Under the engine's lock unless said otherwise; events go through the outbox.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable

from trainmover.communicator import handshake as hs
from trainmover.communicator.channel import Channel
from trainmover.communicator.connecting import Credentials
from trainmover.communicator.engine import Engine
from trainmover.communicator.frames import (
    HEADER,
    FrameType,
    Header,
    pack_flags,
    unpack_edges,
    unpack_flags,
)
from trainmover.communicator.gate import GateOutcome, GateResult, GateSend
from trainmover.communicator.generation import Generation
from trainmover.communicator.incremental import Succession
from trainmover.communicator.mesh import Mesh
from trainmover.communicator.outbox import Outbox
from trainmover.communicator.overdue import OverdueWatch
from trainmover.communicator.ports import OutFrame, Port
from trainmover.communicator.settings import CommunicatorConfig, CommunicatorEvents
from trainmover.errors import CollectiveMismatch
from trainmover.protocol.flags import FINISH

Payload = bytes | memoryview
"""Of a frame; its memory is read until the peer has got it."""


def small_frame(
    number: int, type_: FrameType, payload: Payload, where: tuple[int, ...] = (0, 0)
) -> OutFrame:
    """A frame other than data, with (slot, tag, check) from `where`."""
    slot, tag, check = (*where, 0)[:3]
    header = HEADER.pack(type_, 0, 0, slot, number, 0, 0, len(payload), tag, check)
    return OutFrame(header, payload, number)


class Router:
    """Owner of mesh, channels and generations."""

    def __init__(
        self,
        engine: Engine,
        credentials: Credentials,
        events: CommunicatorEvents,
        config: CommunicatorConfig,
        bind_host: str,
    ) -> None:
        self.outbox = Outbox(engine)
        self.succession = Succession(engine, self.outbox, events, config, self)
        self.mesh = Mesh(engine, credentials, self, bind_host)
        self.succession.mesh = self.mesh
        self.overdue: OverdueWatch
        self.on_finish: Callable[[int, int, int], None] | None = None
        self.streams: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._own = credentials.identity.incarnation
        self._engine = engine
        self._events = events

    # -- gates ---------------------------------------------------------------

    def act(self, generation: Generation, outcomes: list[GateOutcome]) -> None:
        """Carry out what the gates ask for."""
        events, number = self._events, generation.number
        for outcome in outcomes:
            if isinstance(outcome, GateSend):
                where = (outcome.round, outcome.step, outcome.kind)
                frame = small_frame(number, FrameType.GATE, pack_flags(outcome.flags), where)
                generation.ports[outcome.to_rank].put(frame)
            elif isinstance(outcome, GateResult):
                self.outbox.event(lambda it=outcome: self._gate_result(generation, it))  # type: ignore[misc]
            else:
                self.outbox.event(
                    lambda it=outcome: events.gate_mismatch(number, it.step, it.detail)  # type: ignore[misc]
                )

    def _gate_result(self, generation: Generation, result: GateResult) -> None:
        with self._engine.lock:  # a freeze between completion and delivery wins (W12)
            if generation.gates.is_closed:
                return
        self._events.gate_completed(generation.number, result.step, result.kind, result.flags)

    # -- what mesh, channels and generations report ---------------------------

    def data_port(self, channel: Channel, header: Header) -> Port | None:
        """Port of an arriving data frame; None where it is to be kept early or dropped."""
        generation = self.succession.find(header.generation)
        if generation is None or generation.is_broken:
            return None
        self._contact(generation)
        return generation.port_of(channel.peer)

    def _contact(self, generation: Generation) -> None:
        is_ahead = generation is self.succession.current and not generation.is_committed
        if is_ahead and not generation.was_contacted:
            generation.was_contacted = True
            number = generation.number
            self.outbox.event(lambda: self._events.next_generation_frame(number))

    def keep_early(self, channel: Channel, header: Header, payload: bytes | bytearray) -> bool:
        """Keep a frame of a generation that is not known here yet."""
        if header.generation <= self.succession.newest():
            return False
        channel.early.append((header, payload))
        channel.unexpected_kept(len(payload) + 1)
        return True

    def replay_early(self, channel: Channel, number: int) -> None:
        due = [item for item in channel.early if item[0].generation == number]
        channel.early = [item for item in channel.early if item[0].generation > number]
        for header, payload in due:
            channel.unexpected_taken(len(payload) + 1)
            if header.type != FrameType.DATA:
                self.small_frame(channel, header, bytes(payload))
                continue
            port = self.data_port(channel, header)
            if port is not None:
                port.keep(header, bytearray(payload))

    def small_frame(self, channel: Channel, header: Header, payload: bytes) -> None:
        """A frame other than data has arrived."""
        if header.type == FrameType.ROOM:
            channel.out.room(header.check)
            return
        if header.type == FrameType.MARK:
            self.succession.marked(channel, header.generation)
            return
        generation = self.succession.find(header.generation)
        if header.type in (FrameType.ASK, FrameType.ANSWER):
            if generation is not None:
                self.overdue.heard(channel, generation, header.type, header.slot)
            return
        if generation is None:
            self.keep_early(channel, header, payload)
            return
        rank = generation.rank_by_incarnation.get(channel.peer)
        if rank is None:
            return
        number, peer, events = generation.number, channel.peer, self._events
        if header.type == FrameType.GATE:
            self._contact(generation)
            flags = unpack_flags(payload)
            outcomes = generation.gates.arrive(header.tag, header.check, header.slot, flags)
            self.act(generation, outcomes)
            if header.check == FINISH and (told := self.on_finish) is not None:
                step = header.tag
                self.outbox.event(lambda: told(number, rank, step))
        elif header.type == FrameType.PERS:
            kind, step = header.slot, header.tag
            self.outbox.event(lambda: events.control(rank, kind, number, step, payload))
        elif header.type == FrameType.POISON:
            edges = unpack_edges(payload)
            generation.edges.update(dict.fromkeys(edges))
            self.outbox.event(lambda: events.poisoned(number, peer, edges))

    def broken(self, channel: Channel, reason: str) -> None:
        """A stream has ended."""
        self.mesh.forget(channel)
        current = self.succession.current
        if current is not None and current.port_of(channel.peer) is not None:
            current.edges[(self._own, channel.peer)] = None
        self.succession.lost(channel, reason)

    def established(self, channel: Channel) -> None:
        """A channel is open."""
        self.succession.established(channel)

    def knocked(self, peer: str, generation: int) -> None:
        """A higher rank asks this one to connect."""
        self.succession.knocked(peer, generation)

    def connect_failed(self, peer: str, generation: int, reason: str) -> None:
        """A peer could not be reached."""
        succession = self.succession
        if succession.prepared is not None and succession.prepared.number == generation:
            succession.fail_prepare(peer, reason)
        elif succession.current is not None and succession.current.number == generation:
            text = f"could not be reached: {reason}"
            self.outbox.event(lambda: self._events.channel_broken(generation, peer, text))

    def generation_refusal(self, hello: hs.Hello) -> str | None:
        """Why a caller is not welcome."""
        return self.succession.refusal(hello)

    def want_channel(self, generation: Generation, rank: int) -> None:
        """A pair outside the core talks for the first time: the lower rank connects."""
        member = generation.membership.members[rank]
        purpose = hs.PURPOSE_CHANNEL if generation.rank < rank else hs.PURPOSE_KNOCK
        if not generation.is_broken:
            self.mesh.connect(member, generation.number, purpose)

    def mismatch(self, error: CollectiveMismatch) -> None:
        """Ranks called different collectives."""
        self.outbox.event(lambda: self._events.mismatch(error))

    def drain(self) -> None:
        """Say what is due; the lock must not be held."""
        self.outbox.drain()

    def cut_channel(self, peer: str = "") -> bool:
        """For drills: reset the connection to `peer` (to any where empty), as a network does.

        Both ends see a reset; nobody is told otherwise. Returns whether there was one.
        """
        with self._engine.lock:
            for name in sorted(self.mesh.channels):
                if peer in ("", name) or name.startswith(peer + "."):
                    self.mesh.channels[name].reset()
                    break
            else:
                return False
        self.drain()
        return True

    def stream(self, purpose: str, generation: int, peer: str, stream: socket.socket) -> None:
        """A raw stream was dialled by `peer` (called by the mesh)."""
        self.streams.add(stream)
        self.outbox.event(lambda: self._events.stream_accepted(purpose, generation, peer, stream))
