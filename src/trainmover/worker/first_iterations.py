"""A member's first iterations: recorded, classed, and let go of.

Decides how many iterations count (two where DDP lays out its buckets anew in the second) and what
is told: the class, and whether this rank could keep its recording. Which rank keeps it is the
controller's decision. What is recorded, and how, is rehearsal's.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trainmover.errors import RecordingError
from trainmover.protocol.messages import KeepRecording, RecordingStored, RoleClass
from trainmover.rehearsal.caches import SUFFIX as CACHES_SUFFIX
from trainmover.rehearsal.caches import save_caches
from trainmover.rehearsal.classes import fingerprint, state_digest
from trainmover.rehearsal.recorder import Recorder
from trainmover.rehearsal.recording import Recording, RecordingStore
from trainmover.units import MIB
from trainmover.worker.sequence import script_place

if TYPE_CHECKING:
    from trainmover.state.inventory import Inventory
    from trainmover.worker.runtime import Runtime

DDP_ITERATIONS = 2
MACHINE_WORD = "{machine}"
"""In `rehearsal.store`: a directory for each machine."""


def store_root(runtime: Runtime) -> Path:
    """Where recordings lie: as set, else in the run directory."""
    given = runtime.rehearsal.store.replace(MACHINE_WORD, runtime.request.machine)
    return Path(given) if given else Path(runtime.request.spec.log_directory).parent / "rehearsal"


def job_fingerprint(runtime: Runtime) -> str:
    """What recordings of this job are bound to."""
    spec = runtime.request.spec
    return fingerprint(
        Path(spec.script).read_bytes(), spec.arguments, spec.world_size, spec.workers_per_machine
    )


class FirstIterations:
    """Of one entry of `main` of a member. Main thread, but for `decide`."""

    def __init__(self, runtime: Runtime, inventory: Inventory, rank: int) -> None:
        self._runtime = runtime
        self._rank = rank
        stepper = runtime.stepper
        self._has_ddp = stepper is not None and bool(stepper.buckets.modules)
        self._wanted = DDP_ITERATIONS if self._has_ddp else 1
        self._state = state_digest(inventory)
        self._fingerprint = job_fingerprint(runtime)
        self._store = RecordingStore(store_root(runtime), self._fingerprint)
        self._found: Recording | None = self._store.of_rank(rank, self._state)
        self._recorder: Recorder | None = Recorder(
            runtime.communicator,
            runtime.request.spec.workers_per_machine,
            runtime.rehearsal.recording_limit_mb * MIB,
            script_place,
            keeps=self._found is None,
        )
        self._is_complete = False
        self._stored: RecordingStored | None = None
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is watched any more."""
        return self._is_complete

    def before_step(self) -> None:
        """The loop body is about to run."""
        if self._recorder is not None and not self._is_complete:
            self._recorder.begin()

    def undone(self) -> None:
        """The attempt is repeated, or all ranks' buckets start over."""
        if self._recorder is None or self._is_complete:
            return
        if self._has_ddp:
            # The repeated attempt has other buckets than a fresh process's first one: a standby
            # could not be told which of its calls is which.
            self._finish("")
        else:
            self._recorder.undone()

    def after_step(self, *, was_undone: bool) -> None:
        """The loop body has run."""
        recorder = self._recorder
        if recorder is None or self._is_complete:
            return
        if was_undone:
            recorder.undone()
            return
        if not recorder.end() and self._has_ddp:
            self._finish("")
        elif recorder.count >= self._wanted:
            self._finish(recorder.role_class(self._state))

    def close(self) -> None:
        """`main` is entered anew: let go of everything."""
        with self._lock:
            self._is_complete = True
            if self._recorder is not None:
                self._recorder.drop()
            self._recorder = None

    def _finish(self, digest: str) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._is_complete = True
        file, size = "", -1
        if digest and self._found is not None:
            if self._found.header.role_class == digest:
                file, size = str(self._found.path), self._found.header.value_bytes
        elif digest and not recorder.is_over_limit:
            recorder.settle()
            size = recorder.bytes
        if self._found is not None:
            self._found.close()
        if size < 0 or file:
            recorder.drop()
            self._recorder = None
        self._runtime.link.tell(
            RoleClass(
                incarnation=self._runtime.incarnation,
                rank=self._rank,
                fingerprint=self._fingerprint,
                digest=digest,
                bytes=size,
                file=file,
            )
        )

    # ------------------------------------------------------------------ I/O thread

    def decide(self, order: KeepRecording) -> None:
        """The controller has chosen who keeps the recording of this class."""
        if not self._is_complete:
            return
        if not order.is_keeper:
            self.close()
            return
        threading.Thread(
            target=self._keep, args=(order,), name="trainmover-recording", daemon=True
        ).start()

    def _keep(self, order: KeepRecording) -> None:
        with self._lock:
            if self._stored is None:
                self._stored = self._write(order)
            self._runtime.link.tell(self._stored)
        if self._runtime.rehearsal.shares_compile_cache:
            try:
                save_caches(self._store.path(order.role_class).with_suffix(CACHES_SUFFIX))
            except OSError as error:
                # A joiner compiles by itself then; its rehearsal says how long that took.
                self._runtime.tell_finding("rehearsal", f"compile caches not handed over: {error}")

    def _write(self, order: KeepRecording) -> RecordingStored:
        path = self._store.path(order.role_class)
        size, reason = 0, ""
        recorder, self._recorder = self._recorder, None
        try:
            if recorder is None:
                raise RecordingError("the recording is gone")
            draft = recorder.draft(self._fingerprint, order.role_class, self._state, order.ranks)
            size = draft.write(path)
        except (OSError, RecordingError) as error:
            reason = str(error)
        finally:
            if recorder is not None:
                recorder.drop()
        return RecordingStored(
            incarnation=self._runtime.incarnation,
            fingerprint=self._fingerprint,
            role_class=order.role_class,
            file=str(path),
            bytes=size,
            reason=reason,
        )
