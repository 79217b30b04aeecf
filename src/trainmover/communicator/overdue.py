"""Works that wait for too long, and the orderly end.

Decides when a peer counts as overdue: never thrown through autograd, always reported as a broken
channel of the rank whose data is missing.
"""

from __future__ import annotations

import threading
import time

from trainmover.communicator.engine import Engine, Timer
from trainmover.communicator.generation import Generation
from trainmover.communicator.incremental import Succession
from trainmover.communicator.mesh import Mesh
from trainmover.communicator.operation import Operation
from trainmover.communicator.outbox import Outbox
from trainmover.communicator.settings import CommunicatorEvents

_PERIOD_S = 0.5


class OverdueWatch:
    """A look at the works under way, twice a second."""

    def __init__(
        self, engine: Engine, outbox: Outbox, events: CommunicatorEvents, succession: Succession
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._events = events
        self._succession = succession
        self._timer: Timer = engine.call_later(_PERIOD_S, self._look)
        self._is_stopped = False

    def _look(self) -> None:
        with self._engine.lock:
            current = self._succession.current
            if current is not None and not current.is_broken:
                now = time.monotonic()
                for operation in current.outstanding():
                    self._judge(current, operation, now)
        self._outbox.drain()
        if not self._is_stopped:
            self._timer = self._engine.call_later(_PERIOD_S, self._look)

    def _judge(self, generation: Generation, operation: Operation, now: float) -> None:
        call = operation.call
        limit_s = call.group.timeout_s if call.timeout_s is None else call.timeout_s
        if operation.is_overdue or limit_s <= 0 or now - operation.started_at < limit_s:
            return
        operation.is_overdue = True
        missing = [rank for rank, count in sorted(operation.waiting_for.items()) if count > 0]
        others = [rank for rank in call.group.ranks if rank != generation.rank]
        suspects = missing or others
        if not suspects:
            return
        peer = generation.membership.members[suspects[0]].incarnation
        reason = (
            f"no data for {limit_s:g} s in {call.kind.name.lower()} number {operation.sequence} "
            f"of group {call.group.name!r}"
        )
        number = generation.number
        self._outbox.event(lambda: self._events.channel_broken(number, peer, reason))

    def stop(self, mesh: Mesh, timeout_s: float) -> None:
        """Let queued frames leave, then close the mesh; any thread."""
        self._is_stopped = True
        self._timer.cancel()
        deadline = time.monotonic() + timeout_s
        done = threading.Event()

        def end() -> None:
            with self._engine.lock:
                is_drained = all(channel.out.is_drained for channel in mesh.channels.values())
                if is_drained or time.monotonic() >= deadline:
                    mesh.close()
                    done.set()
                    return
            self._engine.call_later(0.005, end)

        if self._engine.on_thread():
            with self._engine.lock:
                mesh.close()
            return
        self._engine.submit(end)
        done.wait(timeout_s + 1.0)
