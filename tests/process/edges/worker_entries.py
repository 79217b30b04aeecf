"""Small real workers for tests of nursery and launcher; run in a forked process."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time

from trainmover.protocol.messages import WorkerUp
from trainmover.protocol.nursery import ForkRequest, FrameBuffer, WorkerHello, frame


def say_and_end(request: ForkRequest) -> int:
    """Print what it was given and end with 7."""
    here = os.getcwd()
    print("hello from", request.incarnation, os.environ.get("LOCAL_RANK"), here, len(os.environ))
    print("group", os.getpgrp() == os.getpid(), "threads", len(os.listdir("/proc/self/task")))
    print("torch", "torch" in sys.modules)
    return 7


def fail(request: ForkRequest) -> int:
    """Raise."""
    raise ValueError(f"wrong in {request.incarnation}")


def linger(request: ForkRequest) -> int:
    """Start a child that would outlive us, then wait."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)
    return 0


def print_much(request: ForkRequest) -> int:
    """Print ten times what the log may hold, then end with 3."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for number in range(10_000):
        print("line", number, "x" * 90)
    return 3


def talk(request: ForkRequest) -> int:
    """Connect to the agent, say who we are, end with the first answer's length."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(request.agent_socket)
    link.sendall(frame(WorkerHello(incarnation=request.incarnation, pid=os.getpid())))
    up = WorkerUp(incarnation=request.incarnation, host=request.host, port=1, pid=os.getpid())
    link.sendall(frame(up))
    buffer = FrameBuffer()
    while not (bodies := buffer.feed(data := link.recv(65536))):
        if not data:
            return 1
    print("got", len(bodies[0]), flush=True)
    return 0
