"""The same script without an agent: `python FILE` (1 process) or torchrun (several).

No resilience: the gate is trivial, nothing is sent anywhere. Adopting trainmover therefore risks
nothing, and a script can be debugged as it always was.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainmover.errors import LocalProtocolError, ScriptError
from trainmover.protocol import exits, flags
from trainmover.protocol.messages import Finding, Message, Plan, StepLogged
from trainmover.worker import events, orders
from trainmover.worker.config import WorkerConfig
from trainmover.worker.distributed_entry import PlainEntry
from trainmover.worker.entry import set_current
from trainmover.worker.job import Job
from trainmover.worker.mistakes import NO_LOOP, USED_BEFORE_RUN
from trainmover.worker.personal import Personal
from trainmover.worker.sequence import SequenceWatch
from trainmover.worker.stepper import Stepper

if TYPE_CHECKING:
    from trainmover.edges.errand import Errand
    from trainmover.protocol.messages import Edge
    from trainmover.worker.entry import Main
    from trainmover.worker.increment_side import IncrementSide
    from trainmover.worker.restoring import Loading
    from trainmover.worker.snapshot_side import SnapshotSide

END_LIMIT_S = 20.0
"""Longest wait for the end of torch's own process group."""


class PlainHost:
    """Grants everything at once."""

    is_managed = False
    walk = None
    generation = 0
    is_tainted = False
    is_running_out = False
    snapshots: SnapshotSide | None = None
    increments: IncrementSide | None = None

    def __init__(self, rank: int) -> None:
        self.orders = orders.OrderBox(lambda: True)
        self.config = WorkerConfig(does_scan=False)
        self.run_id = os.environ.get("TRAINMOVER_RUN_ID", uuid.uuid4().hex[:12])
        self.incarnation = f"plain.{rank}"
        self._rank = rank

    def clear_taint(self) -> None:
        """Nothing is ever tainted."""

    def guard_waits(self, guard: Callable[[], None] | None) -> None:
        """Nothing is ever cut short."""

    def post(self, event: events.Local) -> None:
        """Answer at once."""
        match event:
            case events.BoundaryReached():
                self.orders.give(orders.Go(step=event.step))
            case events.GateRequested() if event.kind == flags.FINISH:
                self.orders.give(orders.Finish())
            case events.GateRequested():
                self.orders.give(orders.Apply(step=event.step, kind=event.kind, vector=event.flags))
            case _:
                raise LocalProtocolError(f"{type(event).__name__} needs a worker under an agent")

    def tell(self, message: Message) -> None:
        """Print what the primary logs, and findings."""
        if isinstance(message, StepLogged):
            values = " ".join(f"{name}={_shown(text)}" for name, text in message.values)
            print(f"step {message.step} {values}", flush=True)
        elif isinstance(message, Finding):
            print(f"trainmover: {message.text}", flush=True)

    def send_personal(self, personal: Personal) -> None:
        """There is no peer to hold it."""

    def watch_first(self, inventory: Any, rank: int) -> None:
        """Nobody rehearses."""

    def fetch_state(self, plan: Plan, rank: int, receive: Callable[..., int]) -> int:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def peek_personal(self, plan: Plan, rank: int) -> Personal | None:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def fetch_shared(self, plan: Plan, rank: int) -> tuple[tuple[str, bytes], ...]:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def fetch_personal(self, plan: Plan, rank: int) -> Personal:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def errand(self, plan: Plan) -> Errand:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def is_void(self, plan: Plan) -> bool:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def loads(self, loading: Loading | None) -> None:
        """There is no generation that could end."""

    def adopted(self, plan: Plan, how: str) -> None:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def received(self, plan: Plan, bytes_received: int) -> None:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def failed(self, plan: Plan, edge: Edge) -> None:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def settled(self, plan: Plan) -> None:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def note(self, phase: str, step: int, collective: str = "") -> None:
        """There is no progress page."""

    def undone(self) -> None:
        """There is no interruption."""

    def mark(self, name: str) -> None:
        """There is no incident report."""

    def set_rank(self, rank: int) -> None:
        """The rank never changes."""

    def note_rank_read(self) -> None:
        """Reading the rank is harmless here."""

    def end_build(self) -> None:
        """Nothing is watched."""

    def rank_readers(self) -> Sequence[str]:
        """Nobody is asked to play another rank."""
        return ()

    def end_now(self, code: int) -> None:
        """Nothing ends a plain process from outside."""
        raise LocalProtocolError("no early end without an agent")

    def enter_again(self, order: orders.RunMain) -> None:
        """`main` is entered once."""
        raise LocalProtocolError("no second entry without an agent")


def run_plain(main: Main) -> None:
    """Enter `main` once, with a default process group of torch's own.

    Raises:
        ScriptError: `main` returned without entering its loop.
        SystemExit: Ctrl-C, with the usual code.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    started_here = _start_group(rank, world_size)
    if rank == 0:
        what = "1 process" if world_size == 1 else f"{world_size} processes under another launcher"
        print(f"trainmover: {what}, no resilience", flush=True)
        if not started_here:
            print(f"trainmover: {USED_BEFORE_RUN}; `trainmover run` refuses it", flush=True)
    entry = orders.RunMain(rank=rank, world_size=world_size, is_loopback=False, attempts=-1)
    stepper = Stepper(PlainHost(rank), entry, SequenceWatch())
    functions = PlainEntry(lambda text: _say(rank, text))
    functions.install()
    is_whole = False
    try:
        _enter(main, Job(stepper.host, stepper), rank)
        is_whole = True
    except KeyboardInterrupt:
        _say(rank, f"interrupted in step {stepper.step_index}; nothing is saved without an agent")
        raise SystemExit(exits.INTERRUPTED) from None
    finally:
        functions.remove()
        if started_here:
            _end_group(is_whole)


def _enter(main: Main, job: Job, rank: int) -> None:
    set_current(job)
    try:
        result = main(job)
        if not job.was_entered:
            raise ScriptError(NO_LOOP)
        if result is not None:
            _say(rank, f"main returned {result!r}; the value is not used")
    finally:
        set_current(None)
        job.close()


def _say(rank: int, text: str) -> None:
    if rank == 0:
        print(f"trainmover: {text}", flush=True)


def _start_group(rank: int, world_size: int) -> bool:
    if dist.is_initialized():
        return False
    backend = "nccl" if torch.cuda.is_available() and world_size > 1 else "gloo"
    if world_size == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    return True


def _end_group(is_whole: bool) -> None:
    """End the default group, within a limit: its own teardown may wait for a peer that is gone.

    The ranks meet first where all of them end well, so that none takes its connections away from
    under another's last collective.
    """
    if not dist.is_initialized():
        return

    def end() -> None:
        if is_whole and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
            dist.barrier()
        dist.destroy_process_group()

    thread = threading.Thread(target=end, name="trainmover-end", daemon=True)
    thread.start()
    thread.join(END_LIMIT_S)
    if thread.is_alive():
        text = f"the process group did not end within {END_LIMIT_S:g} s; leaving without it"
        print(f"trainmover: {text}", flush=True)
        if is_whole:
            sys.stderr.flush()
            os._exit(exits.COMPLETED)


def _shown(text: str) -> str:
    if "0x" not in text:
        return text
    value: Any = float.fromhex(text)
    return f"{value:.6g}"
