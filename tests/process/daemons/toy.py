"""A worker that plays the real lifecycle without torch: its steps take a moment and are counted.

One rank only talks to nobody: its gate completes at once. Enough to exercise daemons with the real
deciders: forming, planned switchover, respawn, standby, restarts, the end.

Arguments: the number of steps, and a file without which it goes on beyond them: a job must not end
before the test has done to it what it is about.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from trainmover.protocol import codec
from trainmover.protocol.messages import StepLogged, Version
from trainmover.protocol.nursery import ForkRequest, FrameBuffer, WorkerHello, frame
from trainmover.protocol.progress_page import PAGE_BYTES, ProgressPage
from trainmover.units import Instant
from trainmover.worker import events as e
from trainmover.worker.lifecycle import LifecycleConfig, initial_state, next_deadline, transition

STEP_S = 0.02
RETRY_S = 0.05


class Toy:
    """One worker: socket to the agent, decider, and a counter for training."""

    def __init__(self, request: ForkRequest) -> None:
        self.request = request
        steps, enough = request.spec.arguments
        self.last, self.enough = int(steps), Path(enough)
        self.state = initial_state(LifecycleConfig(), request.incarnation, now=now())
        descriptor = os.open(request.progress_path, os.O_RDWR)
        self.page = ProgressPage(mmap.mmap(descriptor, PAGE_BYTES))
        os.close(descriptor)
        self.link: socket.socket | None = None
        self.buffer = FrameBuffer()
        self.events: deque[Any] = deque()
        self.step_due: tuple[float, int] | None = None
        self.code: int | None = None
        self.listener = socket.create_server((request.host, 0))

    def run(self) -> int:
        port = self.listener.getsockname()[1]
        self.events.append(e.Started(host=self.request.host, port=port, pid=os.getpid()))
        while self.code is None:
            self.pass_once()
        time.sleep(0.1)
        return self.code

    def pass_once(self) -> None:
        self.connect()
        self.receive()
        if self.step_due is not None and time.monotonic() >= self.step_due[0]:
            step = self.step_due[1]
            self.step_due = None
            kind = 2 if step >= self.last and self.enough.exists() else 1
            self.events.append(e.GateRequested(step=step, kind=kind, flags=(0,) * 8))
        deadline = next_deadline(self.state)
        if deadline is not None and now() >= deadline:
            self.events.append(e.Tick())
        while self.events and self.code is None:
            move = transition(self.state, self.events.popleft(), now())
            self.state = move.state
            for command in move.commands:
                self.act(command)

    def connect(self) -> None:
        if self.link is not None:
            return
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(self.request.agent_socket)
        except OSError:
            time.sleep(RETRY_S)
            return
        hello = WorkerHello(incarnation=self.request.incarnation, pid=os.getpid())
        link.sendall(frame(hello))
        link.settimeout(0.005)
        self.link, self.buffer = link, FrameBuffer()
        self.events.append(e.LinkUp())

    def receive(self) -> None:
        if self.link is None:
            return
        try:
            data = self.link.recv(65536)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self.link.close()
            self.link = None
            self.events.append(e.LinkDown())
            return
        for body in self.buffer.feed(data):
            self.events.append(codec.decode_to_worker(body))

    def send(self, body: Any) -> None:
        if self.link is not None:
            try:
                self.link.sendall(frame(body))
            except OSError:
                self.link = None

    def boundary(self, step: int) -> e.BoundaryReached:
        self.page.write(step=step, generation=self.state.generation, phase="boundary")
        return e.BoundaryReached(
            step=step, identity="x", names_digest=1, attempts=step, sequence_digest="s"
        )

    def act(self, command: Any) -> None:
        match command:
            case e.Send(body=body):
                self.send(body)
            case e.EnterMain(is_loopback=is_loopback):
                self.events.append(self.boundary(0))
                print("main entered", is_loopback, flush=True)
            case e.Proceed(step=step):
                self.step_due = (time.monotonic() + STEP_S, step)
            case e.ContributeGate(step=step, kind=kind, flags=flags):
                self.events.append(
                    e.GateCompleted(
                        generation=self.state.generation, step=step, kind=kind, vector=flags
                    )
                )
            case e.ApplyGate(step=step, kind=kind):
                self.apply(step, kind)
            case e.UndoStep(step=step):
                self.events.append(self.boundary(step))
            case e.BreakGeneration():
                if self.step_due is not None:
                    self.events.append(self.boundary(self.step_due[1]))
                    self.step_due = None
            case e.PreparePhaseOne(plan=plan):
                self.events.append(e.PhaseOneDone(number=plan.number))
            case e.CutOver(plan=plan):
                self.events.append(
                    e.CutOverDone(number=plan.number, version=plan.target, identity="x")
                )
            case e.LeaveMain() | e.FinishMain():
                self.code = 0
            case e.StopWorker(code=code, reason=reason):
                print("stopped:", reason, flush=True)
                self.code = code

    def apply(self, step: int, kind: int) -> None:
        if kind == 2:
            return
        self.page.write(gate=step, generation=self.state.generation)
        loss = (("loss", (1.0 / (step + 1)).hex()),)
        self.send(
            StepLogged(
                incarnation=self.request.incarnation,
                step=step,
                lineage=self.state.generation,
                values=loss,
            )
        )
        self.events.append(self.boundary(step + 1))


def now() -> Instant:
    return Instant(time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def run(request: ForkRequest) -> int:
    """Entry of a worker."""
    return Toy(request).run()


__all__ = ["Version", "run", "sys"]
