"""Hands of the agent's decider for snapshots: map, send to peers, drop; durable writes elsewhere.

Decides nothing about which version counts. Whatever takes time runs on threads of its own, so that
the agent's event loop, and with it the heartbeat, never waits for bytes; what came of it is posted
back as an event. A peer that can't be reached costs a copy, never the job: it is tried again a few
times, then with the next snapshot. A copy that nobody needs any more, of an old version or for a
place that is none now, is called off: it would keep its memory from the next snapshot.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainmover import agent
from trainmover.daemons.durable import DurableWriter
from trainmover.daemons.own_disks import OwnDisk
from trainmover.edges.errand import Errand
from trainmover.edges.snapshot_client import Holder, give
from trainmover.edges.snapshot_server import SnapshotServer
from trainmover.edges.snapshot_store import Kept, SnapshotStore
from trainmover.errors import StateMismatch, TrainMoverError
from trainmover.protocol.messages import (
    BackupPlace,
    CommitCheckpoint,
    KeepSnapshots,
    PlaceBackups,
    SnapshotTaken,
    Version,
    WriteCheckpoint,
)
from trainmover.topology.keeping import Keeping

log = logging.getLogger(__name__)

TRIES: Final = 4
FIRST_PAUSE_S: Final = 0.2
SILENCE_LIMIT_S: Final = 30.0
"""Longest wait for a byte of a snapshot's stream."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the plane needs of the daemon around it."""

    machine: str
    host: str
    secret: Callable[[], bytes | None]
    """Of the job; None before the controller has said which job it is."""
    keeping: Callable[[], Keeping]
    post: Callable[[agent.Event], None]
    """From any thread."""


class SnapshotPlane:
    """Memory, data port and threads of one agent."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._store = SnapshotStore()
        self._durable = DurableWriter(around.machine, self._store, around.keeping, around.post)
        self._lock = threading.Lock()
        self._orders: dict[int, tuple[BackupPlace, ...]] = {}
        self._giving: dict[tuple[int, BackupPlace], tuple[Version, Errand]] = {}
        self._given: dict[tuple[int, BackupPlace], Version] = {}
        self._level = 0
        self._is_closed = threading.Event()
        self._server: SnapshotServer | None = None

    def start(self) -> None:
        """Listen, and say where. Raises OSError."""
        self._server = SnapshotServer(
            self._around.host,
            self._store,
            self._around.secret,
            self._changed,
            SILENCE_LIMIT_S,
            OwnDisk(self._around.machine, self._around.keeping),
        )
        log.info("snapshots are served at %s:%d", self._around.host, self._server.port)
        self._changed()

    def close(self) -> None:
        """End all streams and let go of all memory."""
        self._is_closed.set()
        self._call_off()
        if self._server is not None:
            self._server.close()
        self._store.close()

    def act(self, command: agent.Command) -> bool:
        """Carry out a command about snapshots; False for any other. Never blocks."""
        match command:
            case agent.OpenSnapshot(taken=taken):
                self._open(taken)
            case agent.ShipBackups(order=order):
                self._ship_to(order)
            case agent.DropSnapshots(keep=keep):
                self._drop(keep)
            case agent.WriteShards(order=order):
                self._start(self._write, order)
            case agent.WriteManifest(order=order):
                self._start(self._commit, order)
            case _:
                return False
        return True

    # ------------------------------------------------------------------ own snapshots

    def _open(self, taken: SnapshotTaken) -> None:
        try:
            kept = self._store.open_own(taken)
        except (OSError, StateMismatch) as error:
            # The worker has gone, or is a snapshot further already: the next one will do.
            log.warning("snapshot of rank %d is gone: %s", taken.rank, error)
            return
        self._level = taken.level
        self._start(self._check, kept)

    def _check(self, kept: Kept) -> None:
        if not self._store.check(kept):
            log.warning("snapshot of rank %d was overwritten before it was read", kept.rank)
        self._changed()
        self._ship()

    def _changed(self) -> None:
        if self._is_closed.is_set() or self._server is None:
            return
        self._around.post(
            agent.SnapshotsChanged(
                host=self._around.host,
                port=self._server.port,
                held=self._store.told(),
                level=self._level,
            )
        )

    def _drop(self, keep: KeepSnapshots) -> None:
        self._store.drop(keep.oldest, keep.void)
        self._call_off()
        self._changed()

    # ------------------------------------------------------------------ copies for peers

    def _ship_to(self, order: PlaceBackups) -> None:
        with self._lock:
            self._orders = {one.rank: one.places for one in order.orders}
            self._given = {key: v for key, v in self._given.items() if self._is_placed(*key)}
        self._call_off()
        self._ship()

    def _is_placed(self, rank: int, place: BackupPlace) -> bool:
        return place in self._orders.get(rank, ())

    def _call_off(self) -> None:
        """End what is under way and of no use any more. Does not block."""
        with self._lock:
            for (rank, place), (version, errand) in self._giving.items():
                is_useful = self._is_placed(rank, place) and self._store.is_needed(version)
                if self._is_closed.is_set() or not is_useful:
                    errand.end()

    def _ship(self) -> None:
        """Start what is due; one stream per rank and place at a time, newest snapshot first."""
        for kept in self._store.newest_own():
            for place in self._orders.get(kept.rank, ()):
                errand = self._begin_giving(kept, place)
                if errand is not None:
                    self._start(self._give, kept, place, errand)

    def _begin_giving(self, kept: Kept, place: BackupPlace) -> Errand | None:
        key = (kept.rank, place)
        with self._lock:
            is_placed = self._is_placed(*key) and not self._is_closed.is_set()
            if not is_placed or key in self._giving or self._given.get(key) == kept.version:
                return None
            errand = Errand(f"a copy of rank {kept.rank} for {place.machine}", SILENCE_LIMIT_S)
            self._giving[key] = (kept.version, errand)
        return errand

    def _give(self, kept: Kept, place: BackupPlace, errand: Errand) -> None:
        key = (kept.rank, place)
        is_given = False
        try:
            is_given = self._give_patiently(kept, place, errand)
        finally:
            with self._lock:
                del self._giving[key]
                if is_given:
                    self._given[key] = kept.version
        newest = {one.rank: one.version for one in self._store.newest_own()}
        if errand.is_over or newest.get(kept.rank) != kept.version:
            self._ship()  # a newer one has come meanwhile, or the place is one again

    def _give_patiently(self, kept: Kept, place: BackupPlace, errand: Errand) -> bool:
        pause_s = FIRST_PAUSE_S
        for _ in range(TRIES):
            try:
                self._give_once(kept, place, errand)
                return True
            except StateMismatch as error:
                log.warning("copy of rank %d to %s: %s", kept.rank, place.machine, error)
                return False
            except (TrainMoverError, OSError) as error:
                reason = error
            if errand.is_over or self._is_closed.wait(pause_s):
                return False
            pause_s *= 2
        log.warning("no copy of rank %d on %s: %s", kept.rank, place.machine, reason)
        return False

    def _give_once(self, kept: Kept, place: BackupPlace, errand: Errand) -> None:
        secret = self._around.secret()
        if secret is None:
            raise TrainMoverError("this agent has no job")
        holder = Holder(host=place.host, port=place.port, secret=secret, limit_s=SILENCE_LIMIT_S)
        started = time.monotonic()
        with self._store.reading(kept.rank, kept.version) as held:
            if give(holder, held, errand):
                log.info(
                    "rank %d at step %d is held by %s, %.2f s",
                    kept.rank,
                    kept.version.step,
                    place.machine,
                    time.monotonic() - started,
                )

    # ------------------------------------------------------------------ durable, threads

    def _write(self, order: WriteCheckpoint) -> None:
        self._durable.write(order)
        self._changed()

    def _commit(self, order: CommitCheckpoint) -> None:
        self._durable.commit(order)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except Exception:
                # A thread's end is seen by nobody: a bug here must stand in the log.
                log.exception("work on snapshots has failed")

        threading.Thread(target=run, name=f"snapshots {work.__name__}", daemon=True).start()
