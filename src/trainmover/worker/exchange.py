"""State between workers: who serves it, who fetches it, over which stream.

A source serves only while it stands at exactly the version of the plan that the joiner names
(protocol.md W14, finding 8). Streams are dialled by the joiner and authenticated by the
communicator; each is served by a short-lived thread of its own, off the I/O thread.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainmover.edges.errand import Errand
from trainmover.errors import StateMismatch, TrainMoverError, TransportError
from trainmover.protocol.messages import Plan, Rehearsal, Source
from trainmover.rehearsal.recording import RecordingStore
from trainmover.state.transfer import serve_state
from trainmover.topology import Member
from trainmover.worker.first_iterations import store_root
from trainmover.worker.increment_side import place_of
from trainmover.worker.increment_store import Increment
from trainmover.worker.personal import Personal, decode, encode
from trainmover.worker.shared_leaves import decode_smalls, encode_smalls
from trainmover.worker.streams import LENGTH, exactly

if TYPE_CHECKING:
    from trainmover.worker.runtime import Runtime

BULK = "bulk"
OWN = "own"
EARLY = "early"
"""Own leaves as they are now, without waiting: enough to start loader workers in time."""
RECORDING = "recording"
SHARED = "shared"
"""Small leaves that all ranks have alike."""
INCREMENTS = "increments"
PERSONAL_LIMIT_BYTES = 1 << 30
CHUNK_BYTES = 1 << 22
RECORDING_SILENCE_S = 10.0
"""Longest wait for a byte of a recording: without it a standby rehearses in loop-back, and while it
waits nobody can use it."""
NO_GENERATION = 1 << 62
"""A standby is in none; above all there are, which no member takes for one of its own."""


class Exchange:
    """Serving side on threads, fetching side on the joiner's main thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._condition = threading.Condition()
        self._open_number = 0
        self._aborted = 0
        self._errand: tuple[int, Errand] | None = None
        """Of the newest plan that state was fetched for."""
        self._recording: Errand | None = None

    def ordered(self) -> None:
        """On the I/O thread: the main thread is needed; a rehearsal does without its recording."""
        errand = self._recording
        if errand is not None:
            errand.end()

    def abort(self, number: int) -> None:
        """On the I/O thread: plan `number` is not to be; what is fetched or served for it ends."""
        with self._condition:
            self._aborted = max(self._aborted, number)
            if self._open_number == number:
                self._open_number = 0
            self._condition.notify_all()
            if self._errand is not None and self._errand[0] <= number:
                self._errand[1].end()

    def is_void(self, plan: Plan) -> bool:
        """Whether `plan` is not to be."""
        with self._condition:
            return plan.number <= self._aborted

    # ------------------------------------------------------------------ serving

    def open_serving(self, number: int) -> None:
        """This worker stands at the target of plan `number` until it is settled."""
        with self._condition:
            self._open_number = number
            self._condition.notify_all()

    def close_serving(self, number: int) -> None:
        """The plan is settled: state moves on."""
        with self._condition:
            if self._open_number == number:
                self._open_number = 0

    def serve(self, purpose: str, generation: int, peer: str, stream: socket.socket) -> None:
        """Answer one joiner; on the I/O thread, returns at once."""
        threading.Thread(
            target=self._serve,
            args=(purpose, generation, peer, stream),
            name="trainmover-serve",
            daemon=True,
        ).start()

    def _serve(self, purpose: str, generation: int, peer: str, stream: socket.socket) -> None:
        config = self._runtime.config
        try:
            with stream:
                stream.settimeout(config.transfer_timeout_s)
                if purpose.startswith(RECORDING):
                    self._serve_recording(stream, purpose)
                    return
                if not purpose.startswith(EARLY):
                    self._wait_until_open(generation, config.serve_wait_s)
                self._answer(stream, purpose, generation)
        except (TrainMoverError, OSError) as error:
            if generation <= self._aborted:
                return  # the joiner was told so, too
            # The joiner sees its stream end and reports the edge; here it is worth a line.
            self._runtime.tell_finding("transfer", f"serving {purpose} to {peer}: {error}")

    def _answer(self, stream: socket.socket, purpose: str, generation: int) -> None:
        kind, _, place = purpose.partition(":")
        if kind == BULK:
            self._serve_bulk(stream, generation)
        elif kind == SHARED:
            self._serve_shared(stream)
        elif kind == INCREMENTS:
            self._runtime.increments.serve(stream, place)
        else:
            self._serve_own(stream, purpose)

    def _serve_shared(self, stream: socket.socket) -> None:
        stepper = self._runtime.stepper
        if stepper is None:
            raise TransportError("expected to have state, but main has not been entered")
        own = stepper.own.names or frozenset()
        names = [name for name in stepper.inventory.small_names if name not in own]
        data = encode_smalls(tuple((n, stepper.inventory.small_bytes(n)) for n in names))
        stream.sendall(LENGTH.pack(len(data)) + data)

    def _wait_until_open(self, number: int, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        with self._condition:
            while self._open_number != number:
                if number <= self._aborted:
                    raise TransportError(f"plan {number} was aborted")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransportError(
                        f"expected to stand at the target of plan {number} within {limit_s} s, "
                        f"but stand at plan {self._open_number}"
                    )
                self._condition.wait(left)

    def _serve_bulk(self, stream: socket.socket, number: int) -> None:
        stepper = self._runtime.stepper
        if stepper is None:
            raise TransportError("expected to have state, but main has not been entered")
        serve_state(stream, stepper.inventory, smalls=True, progress=self._halfway(number))

    def _serve_own(self, stream: socket.socket, purpose: str) -> None:
        _, rank, step = purpose.split(":")
        personal = self._own(int(rank), int(step))
        data = b"" if personal is None else encode(personal)
        stream.sendall(LENGTH.pack(len(data)) + data)

    def _own(self, rank: int, step: int) -> Personal | None:
        stepper = self._runtime.stepper
        if stepper is not None and stepper.rank == rank and not stepper.is_shadow:
            return stepper.boundary_personal
        held = self._runtime.store.get(rank, step)
        names = None if stepper is None else stepper.own.names
        if held is None or names is None or held.is_whole:
            return held
        # Sent in front of the first gate, which then showed that some leaves are shared: those
        # change behind the gate, and a joiner gets them from its replica.
        smalls = tuple((name, data) for name, data in held.smalls if name in names)
        return msgspec.structs.replace(held, smalls=smalls)

    def _halfway(self, number: int) -> Callable[[float], None]:
        has_passed = False

        def progress(fraction: float) -> None:
            nonlocal has_passed
            if fraction >= 0.5 and not has_passed:
                has_passed = True
                self._runtime.reached("half_state_sent", number)

        return progress

    def _serve_recording(self, stream: socket.socket, purpose: str) -> None:
        """A standby whose machine does not see the store."""
        _, fingerprint, role_class = purpose.split(":")
        path = RecordingStore(store_root(self._runtime), fingerprint).path(role_class)
        with open(path, "rb") as file:
            stream.sendall(LENGTH.pack(os.fstat(file.fileno()).st_size))
            stream.sendfile(file)

    # ------------------------------------------------------------------ fetching

    def fetch_recording(self, rehearsal: Rehearsal) -> Path:
        """Standby, main thread: the keeper's file, put into the store as this machine sees it.

        Raises TransportError, OSError.
        """
        keeper = rehearsal.keeper
        if keeper is None:
            raise TransportError(f"nobody serves {rehearsal.file}")
        limit_s = min(self._runtime.config.transfer_timeout_s, RECORDING_SILENCE_S)
        purpose = f"{RECORDING}:{rehearsal.fingerprint}:{rehearsal.role_class}"
        store = RecordingStore(store_root(self._runtime), rehearsal.fingerprint)
        path = store.path(rehearsal.role_class)
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{self._runtime.incarnation}")
        self._recording = errand = Errand("a recording", limit_s)
        try:
            if not self._runtime.orders.is_empty:
                errand.end()
            stream = self._runtime.communicator.dial(keeper, purpose, NO_GENERATION, errand)
            with stream, open(half, "wb") as file:
                (left,) = LENGTH.unpack(exactly(stream, LENGTH.size))
                while left:
                    data = exactly(stream, min(left, CHUNK_BYTES))
                    file.write(data)
                    left -= len(data)
        finally:
            self._recording = None
        os.replace(half, path)
        return path

    def fetch_state(self, plan: Plan, rank: int, receive: Callable[..., int]) -> int:
        """Run `receive(stream, progress)` on the stream of the bulk source; bytes received.

        Raises TransportError, StateMismatch.
        """
        source = _source(plan, rank)
        with self._dial(plan, source.bulk_from, BULK) as stream:
            received = receive(stream, self._halfway(plan.number))
        self._runtime.reached("digests_verified", plan.number)
        return received

    def fetch_personal(self, plan: Plan, rank: int) -> Personal:
        """Own leaves of `rank` at the plan's target."""
        personal = self._fetch_own(plan, rank, OWN)
        if personal is None:
            raise StateMismatch(
                f"expected the own state of rank {rank} at version {plan.target.step} from "
                f"{_source(plan, rank).own_from}, which does not hold it"
            )
        return personal

    def fetch_shared(self, plan: Plan, rank: int) -> tuple[tuple[str, bytes], ...]:
        """Small leaves that all ranks have alike, at the plan's target.

        Raises TransportError, StateMismatch.
        """
        with self._dial(plan, _source(plan, rank).shared_from, SHARED) as stream:
            (length,) = LENGTH.unpack(exactly(stream, LENGTH.size))
            if not 0 < length <= PERSONAL_LIMIT_BYTES:
                raise StateMismatch(f"shared leaves of {length} bytes were announced")
            return decode_smalls(exactly(stream, length))

    @contextmanager
    def increments(self, plan: Plan, rank: int) -> Iterator[Iterator[Increment]]:
        """Updates of `rank` from its source's snapshot to the plan's target, one after the other.

        Raises TransportError, StateMismatch.
        """
        source = _source(plan, rank)
        if source.base == plan.target:
            yield iter(())
            return
        side = self._runtime.increments
        purpose = f"{INCREMENTS}:{place_of(source, plan.target)}"
        with self._dial(plan, source.bulk_from, purpose) as stream:
            (count,) = LENGTH.unpack(exactly(stream, LENGTH.size))
            yield (side.read(stream) for _ in range(count))

    def peek_personal(self, plan: Plan, rank: int) -> Personal | None:
        """Own leaves of `rank` as their holder has them now; a hint, not yet the target's."""
        return self._fetch_own(plan, rank, EARLY)

    def _fetch_own(self, plan: Plan, rank: int, how: str) -> Personal | None:
        purpose = f"{how}:{rank}:{plan.target.step}"
        with self._dial(plan, _source(plan, rank).own_from, purpose) as stream:
            (length,) = LENGTH.unpack(exactly(stream, LENGTH.size))
            if not 0 < length <= PERSONAL_LIMIT_BYTES:
                return None
            return decode(exactly(stream, length))

    def _dial(self, plan: Plan, incarnation: str, purpose: str) -> socket.socket:
        member = _member(plan, incarnation)
        return self._runtime.communicator.dial(member, purpose, plan.number, self.errand(plan))

    def errand(self, plan: Plan) -> Errand:
        """All that is fetched for `plan` ends with it. Raises TransportError: it was aborted."""
        with self._condition:
            if self._errand is None or self._errand[0] != plan.number:
                limit_s = self._runtime.config.transfer_timeout_s
                self._errand = (plan.number, Errand(f"state for plan {plan.number}", limit_s))
            errand = self._errand[1]
            if plan.number <= self._aborted:
                errand.end()
        errand.check()
        return errand


def _source(plan: Plan, rank: int) -> Source:
    for source in plan.sources:
        if source.rank == rank:
            return source
    raise StateMismatch(f"plan {plan.number} names no source for rank {rank}")


def _member(plan: Plan, incarnation: str) -> Member:
    for member in (*plan.membership.members, *plan.leaver_members):
        if member.incarnation == incarnation:
            return member
    raise TransportError(f"plan {plan.number} gives no address of {incarnation}")
