"""A standby's walk through the role classes it may have to play, one entry of `main` after another.

Decides how each class's collectives are answered, what surrounds a rehearsal (guard, priority) and
what is told about it. In which order classes come, and when, is the controller's decision; the
iterations themselves are `Job.steps`'.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainmover.errors import RecordingError, TrainMoverError, TransportError
from trainmover.protocol.messages import Coverage, Rehearsal, Uncovered
from trainmover.rehearsal.caches import load_folder
from trainmover.rehearsal.coverage import CoverageWatch, Learned, compiled_graphs
from trainmover.rehearsal.guard import Guard
from trainmover.rehearsal.neighbours import Neighbours, Place
from trainmover.rehearsal.priority import Priority
from trainmover.rehearsal.recording import Recording, RecordingStore
from trainmover.rehearsal.sandbox import Sandbox, open_recording
from trainmover.worker import orders
from trainmover.worker.first_iterations import job_fingerprint, store_root
from trainmover.worker.sequence import script_place

if TYPE_CHECKING:
    from trainmover.state.inventory import Inventory
    from trainmover.worker.runtime import Runtime

LIBRARIES = ("/trainmover/", "/torch/", os.path.dirname(os.__file__) + "/")
"""Callers that are not the script: it is told where it asked for a write."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Walk:
    """Of one standby process. Main thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sandbox: Sandbox | None = None
        self._priority = Priority(runtime.rehearsal.nice)
        self._guard = self._make_guard()
        self._order: orders.RunMain | None = None
        self._began_s = 0.0
        self._graphs_before = 0
        self._known: dict[int, Rehearsal] = {}
        self._learned: Learned | None = None
        self._entry_cost: Uncovered | None = None
        self.coverage: CoverageWatch | None = None
        """After the adoption, for a while: what the rehearsal had not seen."""
        self.classes: list[str] = []
        """Classes walked through so far, the latest last."""
        self.answers = "loopback"
        self.entries: list[str] = []
        """What each entry cost, for the report."""
        self._caches_lie = ""
        """Directory that compiled code was taken over into; empty: torch's own choice."""
        self._is_alone = False
        """Whether the machine's other workers have failed to come once: not asked again."""
        self._said: set[str] = set()

    def _make_guard(self) -> Guard | None:
        runtime = self._runtime
        if runtime.rehearsal.writes == "allow":
            return None
        logs = Path(runtime.request.spec.log_directory or tempfile.gettempdir())
        return Guard(
            logs / "scratch" / runtime.incarnation,
            (logs,),
            lambda: script_place(LIBRARIES),
            lambda text: runtime.tell_finding("shadow-write", text),
        )

    def guard(self) -> None:
        """From here on the script is a shadow's: it touches nothing of the live job."""
        if self._guard is not None:
            self._guard.begin()

    def adopted(self) -> None:
        """The process plays a rank: the script's directories are made for real."""
        learned, self._learned = self._learned, None
        steps = self._runtime.rehearsal.coverage_steps
        if learned is not None and steps > 0:
            self.coverage = CoverageWatch(
                self._runtime.communicator,
                learned,
                self._runtime.request.spec.workers_per_machine,
                steps,
            )
        for failed in self._guard.adopted() if self._guard is not None else ():
            self._runtime.tell_finding("shadow-write", f"a directory can't be made: {failed}")

    # ------------------------------------------------------------------ around an entry

    def begin(self, order: orders.RunMain) -> None:
        """`main` is about to be entered in loop-back."""
        self._order = order
        self._began_s = time.monotonic()
        self._graphs_before = compiled_graphs()
        if not order.is_adoption:
            self._known.update({rank: item for item in order.rehearsals for rank in item.ranks})
            self._priority.lower()
        with self._guard.lifted() if self._guard is not None else nullcontext():
            if not self.entries:
                self._load_caches()
            self._sandbox = self._sandbox_for(order)
        self._learned = Learned(self._sandbox.seen)
        self.coverage = None
        self.guard()

    def _load_caches(self) -> None:
        """Code that members have compiled; nothing where this process is the first to compile."""
        runtime = self._runtime
        if not runtime.rehearsal.shares_compile_cache:
            return
        size, failed = load_folder(store_root(runtime) / job_fingerprint(runtime))
        if size:
            print(f"trainmover: {size} bytes of compiled code taken over", flush=True)
            runtime.mark("compile caches loaded")
        for text in failed:
            runtime.tell_finding("rehearsal", text)
        self._caches_lie = os.environ.get(CACHE_VARIABLE, "")  # torch sets it if nobody has

    def abandon(self) -> str:
        """`main` has raised: nothing is answered or guarded any more; the refused call, if any."""
        sandbox = self._end()
        return sandbox.mismatch if sandbox is not None else ""

    def _end(self) -> Sandbox | None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()
        if self._guard is not None:
            self._guard.end()
        self._priority.restore()
        return sandbox

    def finish(self) -> orders.RunMain | None:
        """This entry's iterations are over and put back. The entry of the next class, if any, and
        if nobody has ordered something else meanwhile, as the founders of a start anew are."""
        order = self._order
        assert order is not None
        current = order.rehearsals[0] if order.rehearsals else None
        self._note_entry(order, current)
        self._note_sandbox()
        if current is not None:
            known = [name for name in self.classes if name != current.role_class]
            self.classes = [*known, current.role_class]
        rest = order.rehearsals[1:]
        if not rest or not self._runtime.orders.is_empty:
            self._end()
            return None
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
        return replace(order, rank=rest[0].as_rank, rehearsals=rest)

    def _note_entry(self, order: orders.RunMain, current: Rehearsal | None) -> None:
        took_s = time.monotonic() - self._began_s
        graphs = compiled_graphs() - self._graphs_before
        name = f" (class {current.role_class})" if current is not None else ""
        how = "entered main again" if order.is_adoption or self.entries else "entered main"
        self.entries.append(
            f"{how} as rank {order.rank}{name}, answers {self.answers}: {took_s:.2f} s, "
            f"{graphs} graphs compiled"
        )
        print(f"trainmover: {self.entries[-1]}", flush=True)
        if order.is_adoption:
            what = f"main again as rank {order.rank}, {graphs} graphs compiled"
            self._entry_cost = Uncovered(kind="entry", what=what, step=-1, ms=took_s * 1e3)

    def _note_sandbox(self) -> None:
        """What this entry could not rehearse as it will be."""
        sandbox = self._sandbox
        if sandbox is None:
            return
        if sandbox.guessed:
            words = "; ".join(sorted(shape.words() for shape in sandbox.guessed))
            self._say(f"answered in loop-back, because its size depends on the data: {words}")
        neighbours = sandbox.neighbours
        if neighbours is None:
            return
        print(f"trainmover: {neighbours.calls} collectives inside the machine", flush=True)
        if neighbours.trouble:
            self._is_alone = True
            self._say(
                f"collectives inside the machine were answered in loop-back: {neighbours.trouble}"
            )

    def _say(self, text: str) -> None:
        """A finding about the rehearsal, once."""
        if text not in self._said:
            self._said.add(text)
            self._runtime.tell_finding("rehearsal", text)

    # ------------------------------------------------------------------ around an iteration

    def before_step(self, inventory: Inventory) -> None:
        """A loop-back iteration starts."""
        if self._caches_lie != os.environ.get(CACHE_VARIABLE, ""):
            # `main` has chosen another directory: torch would look for what was taken over there.
            with self._guard.lifted() if self._guard is not None else nullcontext():
                self._load_caches()
        if self._sandbox is not None:
            self._sandbox.begin()
        if self._learned is not None:
            self._learned.begin_iteration(inventory.models)

    def after_step(self) -> None:
        """It is over. Raises RehearsalMismatch."""
        if self._learned is not None:
            self._learned.end_iteration()
        if self._sandbox is not None:
            self._sandbox.end()

    # ------------------------------------------------------------------ after the adoption

    def before_live_step(self, inventory: Inventory) -> None:
        """A step with a rank begins."""
        if self.coverage is not None:
            self.coverage.begin_step(inventory.models)

    def after_live_step(self, step: int) -> None:
        """It is over: tell what was new in it."""
        coverage, runtime = self.coverage, self._runtime
        if coverage is None:
            return
        parts = coverage.end_step(step)
        if self._entry_cost is not None:
            parts = (self._entry_cost, *parts)
            self._entry_cost = None
        if coverage.is_over:
            self.coverage = None
        if parts or coverage.is_over:
            runtime.link.tell(
                Coverage(
                    incarnation=runtime.incarnation,
                    rank=-1 if runtime.stepper is None else runtime.stepper.rank,
                    generation=runtime.state.generation,
                    step=step,
                    parts=parts,
                    is_final=coverage.is_over,
                )
            )

    # ------------------------------------------------------------------ classes

    def is_other_class(self, built_as: int, rank: int) -> bool:
        """Whether `rank` is known to be of another class than the rank this `main` was built as."""
        here, there = self._known.get(built_as), self._known.get(rank)
        if here is None or there is None:
            return False
        return here.role_class != there.role_class

    def rehearsals_for(self, rank: int) -> tuple[Rehearsal, ...]:
        """How `rank` is rehearsed when `main` is entered again to adopt it."""
        known = self._known.get(rank)
        return () if known is None else (known,)

    def _sandbox_for(self, order: orders.RunMain) -> Sandbox:
        runtime = self._runtime
        self.answers = runtime.rehearsal.answers
        workers = runtime.request.spec.workers_per_machine
        gives_zeros = self.answers == "zeros"
        current = order.rehearsals[0] if order.rehearsals else None
        recording = None
        if self.answers == "recorded" and current is not None:
            try:
                recording = self._open(current)
            except TrainMoverError as error:
                self._say(f"rehearses in loop-back: {error}")
        if recording is None and not gives_zeros:
            self.answers = "loopback"
        return Sandbox(
            runtime.communicator,
            recording,
            workers,
            script_place,
            gives_zeros=gives_zeros,
            neighbours=self._meet(current) if current is not None else None,
        )

    def _meet(self, rehearsal: Rehearsal) -> Neighbours | None:
        """The machine's other workers, if they rehearse beside this one; bounded."""
        runtime = self._runtime
        wait_s = runtime.rehearsal.neighbour_wait_s
        if len(rehearsal.neighbours) < 2 or wait_s <= 0 or self._is_alone:
            return None
        request = runtime.request
        folder = Path(request.agent_socket).parent / f"{request.machine}.rehearsal"
        neighbours = Neighbours(
            runtime.engine,
            runtime.communicator.identity,
            rehearsal.neighbours,
            Place(
                folder=folder,
                host=request.host,
                secret=request.secret,
                meeting=str(len(self.entries)),
                wait_s=wait_s,
            ),
            runtime.communicator.config,
        )
        try:
            neighbours.open()
        except (TransportError, OSError) as error:
            neighbours.close()
            self._is_alone = True
            self._say(f"collectives inside the machine are answered in loop-back: {error}")
            return None
        return neighbours

    def _open(self, rehearsal: Rehearsal) -> Recording:
        """From the store as this machine sees it; else from the keeper. Raises RecordingError."""
        store = RecordingStore(store_root(self._runtime), rehearsal.fingerprint)
        path = store.path(rehearsal.role_class)
        try:
            return open_recording(path, rehearsal.fingerprint, rehearsal.role_class)
        except RecordingError:
            if rehearsal.keeper is None:
                raise
        try:
            path = self._runtime.exchange.fetch_recording(rehearsal)
        except (TransportError, OSError) as error:
            raise RecordingError(
                f"{path} is not visible here, and {rehearsal.keeper.incarnation} did not serve "
                f"it: {error}"
            ) from error
        print(f"trainmover: recording of class {rehearsal.role_class} fetched", flush=True)
        return open_recording(path, rehearsal.fingerprint, rehearsal.role_class)
