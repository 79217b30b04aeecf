"""The same script without an agent: `python FILE` (1 process) or torchrun (several).

No resilience: the gate is trivial, nothing is sent anywhere. Adopting trainmover therefore risks
nothing, and a script can be debugged as it always was.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from trainmover.errors import LocalProtocolError
from trainmover.protocol import flags
from trainmover.protocol.messages import Finding, Message, Plan, StepLogged
from trainmover.worker import events, orders
from trainmover.worker.config import WorkerConfig
from trainmover.worker.entry import set_current
from trainmover.worker.job import Job
from trainmover.worker.personal import Personal
from trainmover.worker.sequence import SequenceWatch
from trainmover.worker.stepper import Stepper

if TYPE_CHECKING:
    from trainmover.protocol.messages import Edge
    from trainmover.worker.entry import Main


class PlainHost:
    """Grants everything at once."""

    is_managed = False
    generation = 0
    is_tainted = False
    is_running_out = False

    def __init__(self, rank: int) -> None:
        self.orders = orders.OrderBox(lambda: True)
        self.config = WorkerConfig(does_scan=False)
        self.run_id = os.environ.get("TRAINMOVER_RUN_ID", uuid.uuid4().hex[:12])
        self.incarnation = f"plain.{rank}"
        self._rank = rank

    def clear_taint(self) -> None:
        """Nothing is ever tainted."""

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

    def fetch_state(self, plan: Plan, rank: int, receive: Callable[..., int]) -> int:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def peek_personal(self, plan: Plan, rank: int) -> Personal | None:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

    def fetch_personal(self, plan: Plan, rank: int) -> Personal:
        """There is no switchover."""
        raise LocalProtocolError("no switchover without an agent")

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

    def enter_again(self, order: orders.RunMain) -> None:
        """`main` is entered once."""
        raise LocalProtocolError("no second entry without an agent")


def run_plain(main: Main) -> None:
    """Enter `main` once, with a default process group of torch's own."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    started_here = _start_group(rank, world_size)
    if rank == 0:
        what = "1 process" if world_size == 1 else f"{world_size} processes under another launcher"
        print(f"trainmover: {what}, no resilience", flush=True)
    host = PlainHost(rank)
    entry = orders.RunMain(rank=rank, world_size=world_size, is_loopback=False, attempts=-1)
    job = Job(host, Stepper(host, entry, SequenceWatch()))
    set_current(job)
    try:
        main(job)
    finally:
        set_current(None)
        job.close()
        if started_here and dist.is_initialized():
            dist.destroy_process_group()


def _start_group(rank: int, world_size: int) -> bool:
    if dist.is_initialized():
        return False
    backend = "nccl" if torch.cuda.is_available() and world_size > 1 else "gloo"
    if world_size == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend)
    return True


def _shown(text: str) -> str:
    if "0x" not in text:
        return text
    value: Any = float.fromhex(text)
    return f"{value:.6g}"
