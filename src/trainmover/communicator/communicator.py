"""The CPU communicator of one worker: what the rest of the worker calls.

Wires engine, mesh, generations and collectives together and holds the mode. Decides nothing
about membership: it reports what breaks, and changes generation when told to.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trainmover.communicator import answers, dialling
from trainmover.communicator import handshake as hs
from trainmover.communicator.call import Call, GroupPlace, Kind
from trainmover.communicator.channel import Channel
from trainmover.communicator.collectives import PROGRAMS
from trainmover.communicator.connecting import Credentials
from trainmover.communicator.counters import Counters
from trainmover.communicator.engine import Engine
from trainmover.communicator.frames import (
    HEADER,
    FrameType,
    Header,
    pack_edges,
    pack_flags,
    unpack_edges,
    unpack_flags,
)
from trainmover.communicator.gate import GateOutcome, GateResult, GateSend
from trainmover.communicator.generation import Generation
from trainmover.communicator.incremental import Succession
from trainmover.communicator.mesh import Mesh
from trainmover.communicator.operation import Operation
from trainmover.communicator.outbox import Outbox
from trainmover.communicator.overdue import OverdueWatch
from trainmover.communicator.ports import OutFrame, Port
from trainmover.communicator.settings import (
    ChannelIdentity,
    ChannelInfo,
    CollectiveCall,
    CommunicatorConfig,
    CommunicatorEvents,
    Mode,
)
from trainmover.errors import CollectiveMismatch, LocalProtocolError
from trainmover.topology import Member, Membership


class Communicator:
    """Channels, generations and collectives of one worker process."""

    def __init__(
        self,
        engine: Engine,
        identity: ChannelIdentity,
        secret: bytes,
        events: CommunicatorEvents,
        config: CommunicatorConfig,
        bind_host: str = "127.0.0.1",
    ) -> None:
        self.identity = identity
        self.config = config
        self.mode = Mode.LOOPBACK
        self.tainted = False
        self.observer: Callable[[CollectiveCall], None] | None = None
        """Called on the calling thread at each collective's entry."""
        self.on_rank_read: Callable[[], None] | None = None
        """Called when a group's rank is read."""
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._engine = engine
        self._events = events
        self._outbox = Outbox(engine)
        self._credentials = Credentials(identity, secret, config)
        self._succession = Succession(engine, self._outbox, events, config, self)
        self._mesh = Mesh(engine, self._credentials, self, bind_host)
        self._succession.mesh = self._mesh
        self._loopback_rank = 0
        self._loopback_size = 1
        self._loopback_sequences: dict[int, int] = {}
        self._streams: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_forked = False
        self._is_closed = False
        self._overdue = OverdueWatch(engine, self._outbox, events, self._succession)
        engine.at_fork_in_child.append(self._become_child)

    # -- facts ---------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        """Where this worker's channels listen."""
        return self._mesh.address

    @property
    def rank(self) -> int:
        """Rank in the current generation, or the one played in loop-back."""
        current = self._succession.current
        return self._loopback_rank if current is None else current.rank

    @property
    def world_size(self) -> int:
        """Ranks of the current generation, or of the one played in loop-back."""
        current = self._succession.current
        return self._loopback_size if current is None else current.world_size

    @property
    def generation(self) -> int:
        """Number of the current generation; 0 before the first."""
        current = self._succession.current
        return 0 if current is None else current.number

    @property
    def channels(self) -> Mapping[str, ChannelInfo]:
        """Open channels by peer incarnation."""
        with self._engine.lock:
            return {peer: channel.info for peer, channel in self._mesh.channels.items()}

    @property
    def counters(self) -> Counters:
        """Totals since construction."""
        with self._engine.lock:
            return Counters.of(self._mesh)

    @property
    def has_outstanding(self) -> bool:
        """Whether a collective of the current generation has been started and not completed."""
        with self._engine.lock:
            current = self._succession.current
            return current is not None and bool(current.outstanding())

    # -- modes ---------------------------------------------------------------

    def start_loopback(self, rank: int, world_size: int) -> None:
        """Answer every collective at once as if each peer had sent what we sent; no taint."""
        with self._engine.lock:
            if self._succession.current is not None:
                raise LocalProtocolError("start_loopback after a generation was entered")
            self._loopback_rank, self._loopback_size = rank, world_size
            self._loopback_sequences.clear()
            self.mode = Mode.LOOPBACK

    def break_generation(self, reason: str, edges: tuple[tuple[str, str], ...] = ()) -> None:
        """Run out: every work completes at once with a valid value, now and from now on.

        Called on: any thread; once per generation, further calls change nothing.
        Blocks: no. Peers learn of it by POISON frames, with the failed `edges` known here.
        """
        with self._engine.lock:
            generation = self._succession.current
            if generation is None or generation.is_broken:
                return
            self.tainted = True  # W1: before any invented value can be seen
            self.mode = Mode.RUN_OUT
            generation.is_broken = True
            generation.gates.close()
            generation.edges.update(dict.fromkeys(edges))
            self._cut_works(generation)
            payload = pack_edges(tuple(generation.edges))
            for port in generation.ports.values():
                self._put(port, FrameType.POISON, payload)
        self.drain()

    def _cut_works(self, generation: Generation) -> None:
        for channel in list(self._mesh.channels.values()):
            channel.cut_generation(generation.number)
        for operation in generation.outstanding():
            operation.cut(answers.run_out)
        generation.clear()

    def clear_taint(self) -> None:
        """The interrupted step was undone: no invented value is visible any more."""
        self.tainted = False

    # -- changing the generation ---------------------------------------------

    def prepare(self, membership: Membership, rank: int) -> None:
        """Phase one: open the channels `membership` needs, while training goes on."""
        with self._engine.lock:
            generation = self._succession.prepare(membership, rank)
            if generation is not None:
                for channel in list(self._mesh.channels.values()):
                    self._replay_early(channel, generation.number)
            self._succession.check_prepared()
        self.drain()

    def cut_over(self, generation: int) -> None:
        """Phase two: send in `generation` from now on, on the channels it inherits or opened."""
        with self._engine.lock:
            entered = self._succession.cut_over(generation)
            if entered is not None:
                for group in list(self.groups):
                    group.follow(entered.rank)
        self.drain()

    def commit(self, generation: int) -> None:
        """`generation` is decided: free the old one, close channels to non-members."""
        with self._engine.lock:
            old = self._succession.commit(generation)
            if old is not None:
                self._retire(old)
            current = self._succession.current
            if current is not None and not current.is_broken:
                self.mode = Mode.LIVE
        self.drain()

    def abort(self, generation: int) -> None:
        """`generation` is not to be: the old one is current again, with all its frames."""
        with self._engine.lock:
            was_current = self.generation == generation
            dropped = self._succession.abort(generation)
            if dropped is not None:
                self._retire(dropped)
            current = self._succession.current
            if was_current and current is not None:
                self.mode = Mode.RUN_OUT if current.is_broken else Mode.LIVE
                for group in list(self.groups):
                    group.follow(current.rank)
        self.drain()

    def _retire(self, old: Generation) -> None:
        """Free a generation; works nobody waited for end with local answers."""
        if old.outstanding():
            self.tainted = True
        self._cut_works(old)

    # -- small messages ------------------------------------------------------

    def send_control(self, to_rank: int, kind: int, step: int, payload: bytes) -> None:
        """Send a small message to a rank of the current generation, in order with data.

        Dropped while running out: after POISON nothing of that generation is sent.
        """
        with self._engine.lock:
            generation = self._require_current()
            if not generation.is_broken:
                frame = self._frame(generation.number, FrameType.PERS, payload, (kind, step))
                generation.ports[to_rank].put(frame)
        self.drain()

    def gate_contribute(self, step: int, kind: int, flags: tuple[int, ...]) -> None:
        """Enter gate `step` of the current generation; the result comes as `gate_completed`."""
        with self._engine.lock:
            generation = self._succession.current
            if generation is None:
                self._outbox.event(lambda: self._events.gate_completed(0, step, kind, flags))
            elif not generation.is_broken:
                self._act(generation, generation.gates.contribute(step, kind, flags))
        self.drain()

    def gate_close(self) -> None:
        """Freeze: gates of the current generation deliver no result any more."""
        with self._engine.lock:
            if self._succession.current is not None:
                self._succession.current.gates.close()

    def _act(self, generation: Generation, outcomes: list[GateOutcome]) -> None:
        events, number = self._events, generation.number
        for outcome in outcomes:
            if isinstance(outcome, GateSend):
                where = (outcome.round, outcome.step, outcome.kind)
                frame = self._frame(number, FrameType.GATE, pack_flags(outcome.flags), where)
                generation.ports[outcome.to_rank].put(frame)
            elif isinstance(outcome, GateResult):
                self._outbox.event(lambda it=outcome: self._gate_result(generation, it))  # type: ignore[misc]
            else:
                self._outbox.event(
                    lambda it=outcome: events.gate_mismatch(number, it.step, it.detail)  # type: ignore[misc]
                )

    def _gate_result(self, generation: Generation, result: GateResult) -> None:
        with self._engine.lock:  # a freeze between completion and delivery wins (W12)
            if generation.gates.is_closed:
                return
        self._events.gate_completed(generation.number, result.step, result.kind, result.flags)

    @staticmethod
    def _frame(
        number: int, type_: FrameType, payload: bytes, where: tuple[int, ...] = (0, 0)
    ) -> OutFrame:
        slot, tag, check = (*where, 0)[:3]
        header = HEADER.pack(type_, 0, 0, slot, number, 0, 0, len(payload), tag, check)
        return OutFrame(header, payload, number)

    def _put(self, port: Port, type_: FrameType, payload: bytes) -> None:
        if port.channel is not None:
            port.channel.send(self._frame(port.generation.number, type_, payload))

    def _require_current(self) -> Generation:
        if self._succession.current is None:
            raise LocalProtocolError("this worker has not entered a generation yet")
        return self._succession.current

    # -- collectives ---------------------------------------------------------

    def start(self, call: Call) -> Operation | None:
        """Start a collective; None where it was answered at once."""
        if self._is_forked:
            raise LocalProtocolError("a collective was called in a forked child process")
        with self._engine.lock:
            sequence = self._number(call)
            generation = self._succession.current
            if self.mode is Mode.LIVE and generation is not None:
                tag = call.tag + 1 if call.is_point_to_point else 0
                operation = Operation(call, generation, self._outbox, sequence, tag)
                generation.enlist(operation)
                operation.run(PROGRAMS[call.kind](operation, self.config))
            else:
                operation = None
                is_running_out = self.mode is Mode.RUN_OUT
        self.drain()
        if operation is None:
            if is_running_out:
                answers.run_out(call, False)
            else:
                answers.loop_back(call)
        return operation

    def _number(self, call: Call) -> int:
        generation, group = self._succession.current, call.group
        if generation is None:
            number = self._loopback_sequences.get(group.id, 0)
            self._loopback_sequences[group.id] = number + 1
            return number
        if call.kind is Kind.SEND:
            return generation.next_sent(group.id, call.tag + 1, group.ranks[call.root])
        if call.kind is Kind.RECV:
            return generation.next_received(group.id, call.tag + 1, group.ranks[call.root])
        if call.kind is Kind.RECV_ANY:
            return 0
        return generation.next_sequence(group.id)

    def sequence_of(self, group: GroupPlace) -> int:
        """Number the next collective of `group` will have."""
        generation = self._succession.current
        numbers = self._loopback_sequences if generation is None else generation.sequences
        return numbers.get(group.id, 0)

    # -- streams -------------------------------------------------------------

    def dial(
        self, member: Member, purpose: str, generation: int, timeout_s: float
    ) -> socket.socket:
        """An authenticated raw stream to `member`; see `dialling.dial`."""
        if self._engine.on_thread():
            raise LocalProtocolError("dial() blocks and must not be called on the I/O thread")
        stream = dialling.dial(self._credentials, member, purpose, generation, timeout_s)
        self._streams.add(stream)
        return stream

    def stream(self, purpose: str, generation: int, peer: str, stream: socket.socket) -> None:
        """A raw stream was dialled by `peer` (called by the mesh)."""
        self._streams.add(stream)
        self._outbox.event(lambda: self._events.stream_accepted(purpose, generation, peer, stream))

    # -- what mesh, channels and generations report (under the lock) ----------

    def data_port(self, channel: Channel, header: Header) -> Port | None:
        """Port of an arriving data frame; None where it is to be kept early or dropped."""
        generation = self._succession.find(header.generation)
        if generation is None or generation.is_broken:
            return None
        self._contact(generation)
        return generation.port_of(channel.peer)

    def _contact(self, generation: Generation) -> None:
        is_ahead = generation is self._succession.current and not generation.is_committed
        if is_ahead and not generation.was_contacted:
            generation.was_contacted = True
            number = generation.number
            self._outbox.event(lambda: self._events.next_generation_frame(number))

    def keep_early(self, channel: Channel, header: Header, payload: bytes | bytearray) -> bool:
        """Keep a frame of a generation that is not known here yet."""
        if header.generation <= self._succession.newest():
            return False
        channel.early.append((header, payload))
        channel.unexpected_kept(len(payload) + 1)
        return True

    def _replay_early(self, channel: Channel, number: int) -> None:
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
            channel.room(header.check)
            return
        if header.type == FrameType.MARK:
            self._succession.marked(channel, header.generation)
            return
        generation = self._succession.find(header.generation)
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
            self._act(generation, outcomes)
        elif header.type == FrameType.PERS:
            kind, step = header.slot, header.tag
            self._outbox.event(lambda: events.control(rank, kind, number, step, payload))
        elif header.type == FrameType.POISON:
            edges = unpack_edges(payload)
            generation.edges.update(dict.fromkeys(edges))
            self._outbox.event(lambda: events.poisoned(number, peer, edges))

    def broken(self, channel: Channel, reason: str) -> None:
        """A stream has ended."""
        self._mesh.forget(channel)
        current = self._succession.current
        if current is not None and current.port_of(channel.peer) is not None:
            current.edges[(self.identity.incarnation, channel.peer)] = None
        self._succession.lost(channel, reason)

    def established(self, channel: Channel) -> None:
        """A channel is open."""
        self._succession.established(channel)

    def knocked(self, peer: str, generation: int) -> None:
        """A higher rank asks this one to connect."""
        self._succession.knocked(peer, generation)

    def connect_failed(self, peer: str, generation: int, reason: str) -> None:
        """A peer could not be reached."""
        succession = self._succession
        if succession.prepared is not None and succession.prepared.number == generation:
            succession.fail_prepare(peer, reason)
        elif self.generation == generation:
            text = f"could not be reached: {reason}"
            self._outbox.event(lambda: self._events.channel_broken(generation, peer, text))

    def generation_refusal(self, hello: hs.Hello) -> str | None:
        """Why a caller is not welcome."""
        return self._succession.refusal(hello)

    def want_channel(self, generation: Generation, rank: int) -> None:
        """A pair outside the core talks for the first time: the lower rank connects."""
        member = generation.membership.members[rank]
        purpose = hs.PURPOSE_CHANNEL if generation.rank < rank else hs.PURPOSE_KNOCK
        if not generation.is_broken:
            self._mesh.connect(member, generation.number, purpose)

    def mismatch(self, error: CollectiveMismatch) -> None:
        """Ranks called different collectives."""
        self._outbox.event(lambda: self._events.mismatch(error))

    def drain(self) -> None:
        """Say what is due; the lock must not be held."""
        self._outbox.drain()

    # -- the end -------------------------------------------------------------

    def close(self) -> None:
        """Close everything, after queued frames have left (bounded)."""
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        self._overdue.stop(self._mesh, self.config.close_timeout_s)

    def _become_child(self) -> None:
        self._is_forked = True
        self._mesh.close_in_child()
        for stream in list(self._streams):
            stream.close()


def completed(result: Any) -> torch.futures.Future[Any]:
    """A future that is complete."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future
