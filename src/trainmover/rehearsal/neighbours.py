"""Collectives inside a standby's machine while its workers rehearse together: real ones.

Decides how the workers of one machine find each other (files in a directory only they share), and
what becomes of a rehearsal whose neighbours are late or gone: the rest is answered in loop-back,
and `trouble` says why. The generation is a private one, over channels of its own: nothing of it can
reach the job, and it ends with the entry of `main`. Which workers rehearse together, and as which
ranks, is the controller's decision.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmover.communicator import answers
from trainmover.communicator.call import Call, GroupPlace
from trainmover.communicator.communicator import Communicator
from trainmover.communicator.engine import Engine
from trainmover.communicator.operation import Operation
from trainmover.communicator.settings import ChannelIdentity, CommunicatorConfig
from trainmover.errors import TransportError
from trainmover.topology import Member, Membership

NUMBER = 1
POLL_S = 0.005
MEET_TIMEOUT_S = 20.0
"""Longest wait for a neighbour's word; none of them has anything else to do then."""
OPEN_TIMEOUT_S = 30.0
"""Longest wait for the channels, once everybody's address is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker meets its neighbours."""

    folder: Path
    """Seen by the workers of this machine alone."""
    host: str
    secret: bytes
    meeting: str
    """Name of this entry of `main`, the same on all of them."""
    wait_s: float


class Neighbours:
    """The workers of one machine in one rehearsal. Main thread, but for the events."""

    def __init__(
        self,
        engine: Engine,
        identity: ChannelIdentity,
        members: Sequence[str],
        place: Place,
        config: CommunicatorConfig,
    ) -> None:
        """Listen, and leave the address for the others; `open` meets them.

        Args:
            engine: The worker's I/O thread.
            identity: Of this worker.
            members: Incarnations of the machine's workers by local rank, this one among them.
            place: Where they meet.
            config: Limits of the worker's own channels.
        """
        self._identity = identity
        self._members = tuple(members)
        self._place = place
        self._local_rank = self._members.index(identity.incarnation)
        self._events = _Events(self._broken)
        limit_s = max(place.wait_s, POLL_S)
        self._communicator = Communicator(
            engine,
            # Another job: a frame of the sandbox can't be taken for one of the real job.
            replace(identity, job=f"{identity.job}/rehearsal"),
            place.secret,
            self._events,
            replace(config, collective_timeout_s=limit_s, outside_step_limit_s=limit_s),
            bind_host=place.host,
        )
        self._groups: dict[int, GroupPlace] = {}
        self._is_lost = False
        self.trouble = ""
        """Why calls were answered in loop-back after all; empty: none was."""
        self.calls = 0
        """Calls that were real."""
        self._forget_others()
        host, port = self._communicator.address
        self._leave("address", f"{host} {port}")

    # ------------------------------------------------------------------ meeting

    def open(self) -> None:
        """Meet the others and open the channels. Raises TransportError, bounded by the place's
        limit."""
        places = [text.split() for text in self._gather("address")]
        members = tuple(
            Member(
                rank=rank,
                incarnation=name,
                machine=self._identity.machine,
                host=host,
                port=int(port),
            )
            for rank, (name, (host, port)) in enumerate(zip(self._members, places, strict=True))
        )
        membership = Membership(generation=NUMBER, members=members)
        self._communicator.prepare(membership, self._local_rank)
        self._events.wait("prepared")
        self._communicator.cut_over(NUMBER)
        self._events.wait("cut_over_done")
        self._leave("inside", "yes")
        self._gather("inside")
        self._communicator.commit(NUMBER)

    def _forget_others(self) -> None:
        """Words of lives that are over: at most one set of a machine's workers rehearses."""
        self._place.folder.mkdir(mode=0o700, exist_ok=True)
        for path in self._place.folder.iterdir():
            if not path.name.endswith(self._members):
                path.unlink(missing_ok=True)

    def _path(self, what: str, incarnation: str) -> Path:
        return self._place.folder / f"{what}-{self._place.meeting}-{incarnation}"

    def _leave(self, what: str, text: str) -> None:
        path = self._path(what, self._identity.incarnation)
        partial = path.with_name(f".{path.name}")
        partial.write_text(text, encoding="ascii")
        os.replace(partial, path)

    def _gather(self, what: str) -> list[str]:
        """Everybody's word, by local rank. Raises TransportError naming who is missing."""
        limit_s = min(self._place.wait_s, MEET_TIMEOUT_S)
        deadline = time.monotonic() + limit_s
        found: dict[str, str] = {}
        while True:
            for name in self._members:
                path = self._path(what, name)
                if name not in found and path.exists():
                    found[name] = path.read_text(encoding="ascii")
            missing = [name for name in self._members if name not in found]
            if not missing:
                return [found[name] for name in self._members]
            if time.monotonic() >= deadline:
                raise TransportError(
                    f"{', '.join(missing)} did not come to rehearse within {limit_s:g} s"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Leave; bounded. Words stay: a slower neighbour may not have read them yet."""
        self._communicator.close()

    # ------------------------------------------------------------------ calls

    def start(self, call: Call) -> Operation | None:
        """Start a collective of a group inside the machine."""
        if self._is_lost:
            self._lonely("a neighbour has left")
            answers.loop_back(call)
            return None
        self.calls += 1
        operation = self._communicator.start(self._translated(call))
        if self._is_lost:
            self._lonely("a neighbour has left")  # maybe in front of this call
        return operation

    def _translated(self, call: Call) -> Call:
        """The same call among local ranks."""
        group, count = call.group, len(self._members)
        known = self._groups.get(group.id)
        if known is None or known.rank != group.rank:
            ranks = tuple(rank % count for rank in group.ranks)
            known = GroupPlace(group.name, group.id, ranks, group.rank, self._place.wait_s)
            self._groups[group.id] = known
        inside = Call(call.kind, known, call.inputs, call.outputs, call.result)
        inside.reduction, inside.root, inside.tag = call.reduction, call.root, call.tag
        inside.check, inside.is_initialised = call.check, call.is_initialised
        return inside

    def _lonely(self, why: str) -> None:
        self.trouble = self.trouble or why

    def _broken(self, reason: str) -> None:
        """On the I/O thread: a neighbour is gone or overdue. What waits for it ends at once."""
        self._is_lost = True
        if self._communicator.has_outstanding:
            self._lonely(reason)
        self._communicator.break_generation(reason)


class _Events:
    """What the private communicator tells."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._changed = threading.Condition()
        self._seen: set[str] = set()
        self._failed = ""

    def wait(self, name: str) -> None:
        """Until `name` has been told. Raises TransportError."""

        def is_known() -> bool:
            return name in self._seen or bool(self._failed)

        with self._changed:
            if not self._changed.wait_for(is_known, OPEN_TIMEOUT_S):
                raise TransportError(f"the neighbours' channels are not {name} in time")
            if self._failed:
                raise TransportError(self._failed)

    def _note(self, name: str = "", failed: str = "") -> None:
        with self._changed:
            self._seen.add(name)
            self._failed = self._failed or failed
            self._changed.notify_all()

    def prepared(self, generation: int) -> None:
        self._note("prepared")

    def cut_over_done(self, generation: int, channels: Any) -> None:
        self._note("cut_over_done")

    def prepare_failed(self, generation: int, peer: str, reason: str) -> None:
        self._note(failed=f"no channel to {peer}: {reason}")

    def cut_over_failed(self, generation: int, peer: str, reason: str) -> None:
        self._note(failed=f"{peer}: {reason}")

    def channel_broken(self, generation: int, peer: str, reason: str) -> None:
        self._note(failed=f"{peer}: {reason}")
        self._broken(f"{peer}: {reason}")

    def poisoned(self, generation: int, peer: str, edges: Any) -> None:
        self._broken(f"{peer} has lost a neighbour")

    def mismatch(self, error: Exception) -> None:
        self._broken(str(error))

    def next_generation_frame(self, generation: int) -> None:
        """There is one generation only; its frames wait until it is committed here."""

    def gate_completed(self, generation: int, step: int, kind: int, flags: Any) -> None:
        """A sandbox has no gate."""

    def gate_mismatch(self, generation: int, step: int, detail: str) -> None:
        """A sandbox has no gate."""

    def control(
        self, from_rank: int, kind: int, generation: int, step: int, payload: bytes
    ) -> None:
        """Nobody sends small messages here."""

    def stream_accepted(self, purpose: str, generation: int, peer: str, stream: Any) -> None:
        """Nobody dials streams here; one that comes is refused."""
        stream.close()
