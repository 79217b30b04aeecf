"""The CPU communicator of one worker: what the rest of the worker calls.

Wires engine, mesh, generations and collectives together and holds the mode. Decides nothing
about membership: it reports what breaks, and changes generation when told to.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainmover.communicator import answers, dialling
from trainmover.communicator.call import Call, GroupPlace, Kind
from trainmover.communicator.connecting import Credentials
from trainmover.communicator.counters import Counters
from trainmover.communicator.engine import Engine
from trainmover.communicator.frames import FrameType, pack_edges
from trainmover.communicator.generation import Generation
from trainmover.communicator.operation import Operation
from trainmover.communicator.overdue import OverdueWatch
from trainmover.communicator.programs import PROGRAMS
from trainmover.communicator.routing import Payload, Router, small_frame
from trainmover.communicator.settings import (
    ChannelIdentity,
    ChannelInfo,
    CollectiveCall,
    CommunicatorConfig,
    CommunicatorEvents,
    Mode,
    Place,
)
from trainmover.edges.errand import Errand
from trainmover.errors import LocalProtocolError
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
        self.after_wait: Callable[[], None] | None = None
        """Called when Python code has waited for a collective; may raise."""
        self.on_invented: Callable[[], object] = bool
        """Called in front of invented values: by the caller, where it may raise; by a break."""
        self.on_rank_read: Callable[[], None] | None = None
        """Called when a group's rank is read."""
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self.wait = engine.wait
        self._engine = engine
        self._events = events
        self._credentials = Credentials(identity, secret, config)
        self._router = Router(engine, self._credentials, events, config, bind_host)
        self._outbox = self._router.outbox
        self._succession = self._router.succession
        self._mesh = self._router.mesh
        self._loopback_rank = 0
        self._loopback_size = 1
        self._loopback_sequences: dict[int, int] = {}
        self._is_held = self._is_forked = self._is_closed = False
        self._overdue = OverdueWatch(engine, self._outbox, events, self._succession, config)
        self._router.overdue = self._overdue
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

    def show_place(
        self, place: Callable[[], Place], awaited_ranks: Callable[[], tuple[int, ...]]
    ) -> None:
        """Where the main thread is, and whose small messages it waits for: told to peers that wait
        for this rank. Both are called in a turn, with the lock held, and must not block.
        """
        self._overdue.place, self._overdue.awaited_ranks = place, awaited_ranks

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
            if generation.outstanding():
                self.on_invented()
            self._cut_works(generation)
            payload = pack_edges(tuple(generation.edges))
            for port in generation.ports.values():
                if port.channel is not None:
                    port.channel.send(small_frame(generation.number, FrameType.POISON, payload))
        self._outbox.drain()

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
                    self._router.replay_early(channel, generation.number)
            self._succession.check_prepared()
        self._outbox.drain()

    def cut_over(self, generation: int, *, is_held: bool = False) -> None:
        """Phase two: send in `generation` from now on, on the channels it inherits or opened.

        With `is_held` the training thread is somewhere else still: until `release` its collectives
        are answered here, and count for nothing in the new generation.
        """
        with self._engine.lock:
            if is_held:
                self._is_held = self.tainted = True
            entered = self._succession.cut_over(generation)
            if entered is not None:
                for group in list(self.groups):
                    group.follow(entered.rank)
        self._outbox.drain()

    def commit(self, generation: int) -> None:
        """`generation` is decided: free the old one, close channels to non-members."""
        with self._engine.lock:
            old = self._succession.commit(generation)
            if old is not None:
                self._retire(old)
            current = self._succession.current
            if current is not None and not current.is_broken and not self._is_held:
                self.mode = Mode.LIVE
        self._outbox.drain()

    def release(self) -> None:
        """The training thread begins anew: its collectives belong to the current generation."""
        with self._engine.lock:
            current = self._succession.current
            self._is_held = False
            if current is not None and not current.is_broken:
                self.mode = Mode.LIVE
                self.tainted = False

    def abort(self, generation: int) -> None:
        """`generation` is not to be: the old one is current again, with all its frames."""
        with self._engine.lock:
            was_current = self.generation == generation
            dropped = self._succession.abort(generation)
            if dropped is not None:
                self._retire(dropped)
            current = self._succession.current
            self._is_held = self._is_held and not was_current
            if was_current and current is not None:
                self.mode = Mode.RUN_OUT if current.is_broken else Mode.LIVE
                for group in list(self.groups):
                    group.follow(current.rank)
        self._outbox.drain()

    def _retire(self, old: Generation) -> None:
        """Free a generation; works nobody waited for end with local answers."""
        if old.outstanding():
            self.tainted = True
        self._cut_works(old)

    # -- small messages ------------------------------------------------------

    def send_control(self, to_rank: int, kind: int, step: int, payload: Payload) -> None:
        """Send a message to a rank of the current generation, in order with data.

        Dropped while running out: after POISON nothing of that generation is sent.
        """
        with self._engine.lock:
            generation = self._require_current()
            if not generation.is_broken and not self._is_held:
                frame = small_frame(generation.number, FrameType.PERS, payload, (kind, step))
                generation.ports[to_rank].put(frame)
        self._outbox.drain()

    def gate_contribute(self, step: int, kind: int, flags: tuple[int, ...]) -> None:
        """Enter gate `step` of the current generation; the result comes as `gate_completed`."""
        with self._engine.lock:
            generation = self._succession.current
            if generation is None:
                self._outbox.event(lambda: self._events.gate_completed(0, step, kind, flags))
            elif not generation.is_broken:
                self._router.act(generation, generation.gates.contribute(step, kind, flags))
        self._outbox.drain()

    def hear_finish(self, told: Callable[[int, int, int], None]) -> None:
        """From now on `told(generation, rank, step)` is called on the I/O thread when a peer enters
        the gate behind the loop, at which step this rank may still be."""
        self._router.on_finish = told

    def gate_close(self) -> None:
        """Freeze: gates of the current generation deliver no result any more."""
        with self._engine.lock:
            if self._succession.current is not None:
                self._succession.current.gates.close()

    def _require_current(self) -> Generation:
        if self._succession.current is None:
            raise LocalProtocolError("this worker has not entered a generation yet")
        return self._succession.current

    # -- collectives ---------------------------------------------------------

    def interpose(self, hook: Callable[[Call], Operation | None] | None) -> None:
        """From now on `hook` is given every call in place of `start`; None: nobody is.

        The type changes and changes back: once recorded, nothing of it is left to pay for.
        """
        if hook is None:
            self.__class__ = Communicator
            self.__dict__.pop("hook", None)
        else:
            self.hook = hook
            self.__class__ = InterposedCommunicator

    def start(self, call: Call) -> Operation | None:
        """Start a collective; None where it was answered at once."""
        if self._is_forked:
            raise LocalProtocolError("a collective was called in a forked child process")
        with self._engine.lock:
            sequence = self._number(call)
            generation = self._succession.current
            if self.mode is Mode.LIVE and generation is not None and not self._is_held:
                tag = call.tag + 1 if call.is_point_to_point else 0
                operation = Operation(call, generation, self._outbox, sequence, tag)
                generation.enlist(operation)
                with self._plain_mode():
                    operation.run(PROGRAMS[call.kind](operation, self.config))
            else:
                operation = None
                is_running_out = self.mode is Mode.RUN_OUT
                # W1, also where an earlier attempt's taint was cleared by its undo.
                self.tainted = self.tainted or is_running_out
        self._outbox.drain()
        if operation is None and is_running_out:
            self.on_invented()
            answers.run_out(call, False)
        elif operation is None:
            answers.loop_back(call)
        return operation

    @staticmethod
    def _plain_mode() -> AbstractContextManager[object]:
        """Aliases made in the caller's inference mode could not be written by the I/O thread."""
        if torch.is_inference_mode_enabled():
            return torch.inference_mode(False)
        return nullcontext()

    def _number(self, call: Call) -> int:
        generation, group = self._counting(), call.group
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

    def _counting(self) -> Generation | None:
        """Where calls are numbered; None: answered here, perhaps with the next one current."""
        is_answered_here = self._is_held or self.mode is Mode.RUN_OUT
        return None if is_answered_here else self._succession.current

    def sequence_of(self, group: GroupPlace) -> int:
        """Number the next collective of `group` will have."""
        generation = self._counting()
        if generation is None:
            return self._loopback_sequences.get(group.id, 0)
        return generation.sequences.get(group.id, 0)

    # -- streams -------------------------------------------------------------

    def dial(self, member: Member, purpose: str, generation: int, errand: Errand) -> socket.socket:
        """An authenticated raw stream to `member`; see `dialling.dial`."""
        if self._engine.on_thread():
            raise LocalProtocolError("dial() blocks and must not be called on the I/O thread")
        stream = dialling.dial(self._credentials, member, purpose, generation, errand)
        self._router.streams.add(stream)
        return stream

    # -- the end -------------------------------------------------------------

    def cut_channel(self, peer: str = "") -> bool:
        """For drills: reset the connection to `peer`, to any where empty; whether there was one."""
        return self._router.cut_channel(peer)

    def close(self) -> None:
        """Close everything, after queued frames have left (bounded)."""
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        self._engine.at_fork_in_child.remove(self._become_child)
        self._overdue.stop(self._mesh, self.config.close_timeout_s)

    def _become_child(self) -> None:
        self._is_forked = True
        self._mesh.close_in_child()
        for stream in list(self._router.streams):
            stream.close()


class InterposedCommunicator(Communicator):
    """A communicator while its calls are recorded or answered by somebody else."""

    def start(self, call: Call) -> Operation | None:
        """Hand `call` to the hook."""
        return self.hook(call)
