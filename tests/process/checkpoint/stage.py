"""A process that saves a checkpoint when it is told to, so that faults can be put into just that.

Reads one JSON line per save on standard input; forks a child that has everything imported, prints
its pid, and lets it begin at the next line. Prints how it ended: `killed`, or what it said.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import sys
import threading
from pathlib import Path
from typing import Any

from tests.unit.checkpoint.sample import QUICK, RUN, Tensor, save

from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.local_store import LocalStore
from trainmover.checkpoint.retention import KeepLast
from trainmover.checkpoint.writer import WriteOptions
from trainmover.errors import CheckpointError

TENSORS = (
    Tensor(name="weight", shape=(6, 5), is_sharded=True),
    Tensor(name="moment", dtype="float64", shape=(6, 5), kind="optimizer", is_sharded=True),
    Tensor(name="step", kind="optimizer"),
)
OPTIONS = WriteOptions(split_bytes=130, chunk_bytes=4096)


def save_and_prune(root: Path, step: int, **fields: Any) -> list[str]:
    """One save of both ranks, the commit, and retention; the problems that pruning had."""
    store = LocalStore(root, retries=QUICK)
    save(store, step, options=OPTIONS, tensors=TENSORS, **fields)
    return list(prune(store, KeepLast(1), run_id=RUN).problems)


def child(order: dict[str, Any]) -> str:
    """Save under the order's conditions; what came of it, as a line."""
    if order.get("arm"):
        ctypes.CDLL(None).sweep_arm(order["arm"])  # the preloaded library counts from here on
    if order.get("is_inline"):
        # strace counts calls per thread: with one thread it counts them all.
        threading.Thread.start = threading.Thread.run  # type: ignore[method-assign]
    if order.get("file_limit"):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_limit"], hard))
    if order.get("user"):
        os.setgroups([order["group"]])
        os.setgid(order["user"])
        os.setuid(order["user"])
    if order.get("umask") is not None:
        os.umask(order["umask"])
    try:
        problems = save_and_prune(Path(order["root"]), order["step"])
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return f"pruning: {problems}" if problems else "done"


def wait_for(begin: int) -> None:
    """Until a byte comes; a tracer sees a call that nobody counts, over and over."""
    while not select.select([begin], [], [], 0.005)[0]:
        os.sched_yield()
    os.read(begin, 1)


def main() -> None:
    """Serve saves until standard input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        begin, began = os.pipe()
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(began)
            os.close(told)
            wait_for(begin)
            os.write(tell, child(order).encode())
            os._exit(0)
        os.close(begin)
        os.close(tell)
        print(pid, flush=True)
        sys.stdin.readline()
        os.write(began, b"g")
        os.close(began)
        with os.fdopen(told, "rb") as answer:
            said = answer.read()
        status = os.waitpid(pid, 0)[1]
        outcome = "killed" if os.WIFSIGNALED(status) else said.decode() or f"status {status}"
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
