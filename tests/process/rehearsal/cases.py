"""What ranks do in tests of recorder and sandbox; run in spawned processes."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.process.communicator.fleet import Rank
from trainmover.communicator import (
    ChannelIdentity,
    Communicator,
    CommunicatorConfig,
    Engine,
)
from trainmover.communicator.group import Group
from trainmover.errors import RehearsalMismatch
from trainmover.rehearsal.recorder import Recorder
from trainmover.rehearsal.recording import Recording
from trainmover.rehearsal.sandbox import Sandbox, open_recording

REPEATS, ROUNDS = 60, 5
MORE_ROUNDS = 30


def calls(group: Any, rank: int, size: int, value: float) -> list[torch.Tensor]:
    """One imaginary iteration; what came back."""
    total = torch.full((5,), value)
    group.allreduce([total]).wait()
    gathered = torch.empty(size, 3)
    group.all_gather_single(gathered, torch.full((3,), value)).wait()
    piece = torch.empty(2)
    group.reduce_scatter_single(piece, torch.full((2 * size,), value)).wait()
    around = torch.empty(size)
    group.all_to_all_single(around, torch.full((size,), value), None, None).wait()
    got = torch.empty(4)
    work = group.recv([got], (rank - 1) % size, 0)
    group.send([torch.full((4,), value)], (rank + 1) % size, 0).wait()
    work.wait()
    group.barrier().wait()
    return [total, gathered.clone(), piece, around, got]


def cpu_per_call(group: Any) -> float:
    """CPU seconds of one all-reduce on this thread; for the report, not judged."""
    tensor, rounds = torch.zeros(4), []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(REPEATS):
            group.allreduce([tensor]).wait()
        rounds.append((time.thread_time() - began) / REPEATS)
    return statistics.median(rounds)


def functions_per_call(group: Any) -> int:
    """Functions that one all-reduce enters on this thread, at best (nothing had to be waited for).

    Counted, not timed: a call that still met a recorder would enter more of them.
    """
    tensor, counts = torch.zeros(4), []
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    for _ in range(REPEATS):
        entered = 0
        sys.setprofile(count)
        group.allreduce([tensor]).wait()
        sys.setprofile(None)
        counts.append(entered)
    return min(counts)


def is_untouched(communicator: Communicator) -> bool:
    """No hook, and nothing of the recorder, can be reached from the communicator."""
    held = [*vars(communicator).values(), type(communicator).start]
    return (
        type(communicator) is Communicator
        and "hook" not in vars(communicator)
        and not any("trainmover.rehearsal" in str(getattr(x, "__module__", "")) for x in held)
    )


def recorded_and_answered(rank: Rank, folder: str) -> Any:
    """Record one iteration live, replay it alone; the recorder is gone in between."""
    rank.init()
    group: Any = dist.group.WORLD
    before, functions_before = cpu_per_call(group), functions_per_call(group)
    recorder = Recorder(rank.communicator, 1, 1 << 20, lambda: "case.py:1")
    recorder.begin()
    calls(group, rank.index, rank.size, 99.0)
    recorder.undone()  # the attempt is repeated: nothing of it is kept
    got = calls(group, rank.index, rank.size, 1.0 + rank.index)
    for tensor in got:
        tensor.clone()
    assert recorder.end()
    assert is_untouched(rank.communicator)
    after, functions_after = cpu_per_call(group), functions_per_call(group)
    # At best, again: on a busy machine that may take more rounds, the same ones on all ranks.
    for _ in range(MORE_ROUNDS):
        is_worse = torch.tensor([functions_after > functions_before])
        group.allreduce([is_worse], dist.ReduceOp.MAX).wait()
        if not is_worse:
            break
        functions_after = min(functions_after, functions_per_call(group))
    assert functions_after <= functions_before
    recorder.settle()
    path = Path(folder) / f"rank{rank.index}.recording"
    kept = recorder.draft("f", recorder.role_class("s"), "s", (rank.index,)).write(path)
    assert kept == sum(tensor.nbytes for tensor in got)
    recorder.drop()
    answered = replay(rank, path, got)
    return answered, before, after


def replay(rank: Rank, path: Path, expected: list[torch.Tensor]) -> str:
    """A standby's process: other communicator, no peers."""
    recording = Recording(path)
    standby = Communicator(
        Engine(),
        ChannelIdentity("job", "standby", "m9"),
        b"secret",
        rank.events,  # type: ignore[arg-type]
        CommunicatorConfig(),
    )
    standby.start_loopback(rank.index, rank.size)
    group = Group(standby, "g", tuple(range(rank.size)), rank.index, 60.0)
    sandbox = Sandbox(standby, recording, 1, lambda: "case.py:2")
    for _ in range(2):  # an iteration behind the recorded one gets the same answers
        sandbox.begin()
        got = calls(group, rank.index, rank.size, 7.0)
        sandbox.end()
        assert is_untouched(standby)
        for value, wanted in zip(got, expected, strict=True):
            assert torch.equal(value, wanted)
    sandbox.begin()
    refused = ""
    try:
        group.allreduce([torch.zeros(6)])
    except RehearsalMismatch as error:
        refused = str(error)
    sandbox.close()
    standby.close()
    header = recording.header
    open_recording(path, header.fingerprint, header.role_class).close()
    recording.close()
    return refused


def recordless_bytes(rank: Rank) -> Any:
    """Groups inside a machine and void attempts leave nothing."""
    rank.init()
    group: Any = dist.group.WORLD
    recorder = Recorder(rank.communicator, rank.size, 1 << 20, lambda: "case.py:3")
    recorder.begin()
    calls(group, rank.index, rank.size, 1.0)
    assert recorder.end()
    assert recorder.bytes == 0, "no group spans machines"
    small = Recorder(rank.communicator, 1, 16, lambda: "case.py:4")
    small.begin()
    calls(group, rank.index, rank.size, 1.0)
    assert small.end()
    assert small.is_over_limit
    assert small.bytes == 0
    return recorder.count
