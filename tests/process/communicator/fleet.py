"""Several ranks as processes of their own, for tests of the communicator.

They are forked by one warm process of the test session (`tests.warm`), as workers are by their
nursery: importing torch in each would take longer than most of what is tested.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from tests import warm
from trainmover.communicator import (
    ChannelIdentity,
    Communicator,
    CommunicatorConfig,
    Engine,
    Mode,
    init_process_group,
)
from trainmover.topology import Member, Membership

SECRET = b"a secret of the tests"


class Recorder:
    """Events as (name, arguments), to wait for; breaks are answered as a worker would."""

    def __init__(self) -> None:
        self.communicator: Communicator | None = None
        self.seen: list[tuple[Any, ...]] = []
        self.breaks_on_loss = True
        self._changed = threading.Condition()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)

        def note(*arguments: Any) -> None:
            if name in ("channel_broken", "poisoned") and self.breaks_on_loss:
                assert self.communicator is not None
                if arguments[0] == self.communicator.generation:
                    self.communicator.break_generation(name)
            with self._changed:
                self.seen.append((name, *arguments))
                self._changed.notify_all()

        return note

    def wait(self, name: str, *prefix: Any, timeout_s: float = 40.0) -> tuple[Any, ...]:
        def found() -> tuple[Any, ...] | None:
            for event in self.seen:
                if event[: 1 + len(prefix)] == (name, *prefix):
                    return event
            return None

        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, timeout_s):
                raise TimeoutError(f"no {name}{prefix} after {timeout_s} s; seen {self.seen}")
            event = found()
            assert event is not None
            return event


class Rank:
    """What a test function gets: one worker's communicator and the fleet's blackboard."""

    def __init__(self, index: int, size: int, board: Any, machines: bool, **config: Any) -> None:
        self.index, self.size, self.board = index, size, board
        self.machines = machines
        self.barrier = config.pop("barrier")
        self.events = Recorder()
        self.engine = Engine()
        self.fatal: list[BaseException] = []
        self.engine.on_fatal = self._fatal
        self.engine.start()
        self.incarnation = f"w{index}"
        machine = f"m{index}" if machines else "m0"
        self.communicator = Communicator(
            self.engine,
            ChannelIdentity("job", self.incarnation, machine),
            SECRET,
            self.events,  # type: ignore[arg-type]
            CommunicatorConfig(**config),
        )
        self.events.communicator = self.communicator
        host, port = self.communicator.address
        board[f"member{index}"] = (self.incarnation, machine, host, port)

    def _fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        traceback.print_exception(error)
        import os

        os._exit(70)

    def member(self, rank: int, index: int) -> Member:
        deadline = time.monotonic() + 60
        while f"member{index}" not in self.board:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        incarnation, machine, host, port = self.board[f"member{index}"]
        return Member(rank=rank, incarnation=incarnation, machine=machine, host=host, port=port)

    def membership(self, generation: int, indices: list[int] | None = None) -> Membership:
        indices = list(range(self.size)) if indices is None else indices
        members = tuple(self.member(rank, index) for rank, index in enumerate(indices))
        return Membership(generation=generation, members=members)

    def enter(self, generation: int, indices: list[int] | None = None) -> Any:
        membership = self.membership(generation, indices)
        rank = membership.rank_of(self.incarnation)
        assert rank is not None
        self.communicator.prepare(membership, rank)
        self.events.wait("prepared", generation)
        self.sync(f"prepared{generation}", len(membership.members))
        self.communicator.cut_over(generation)
        done = self.events.wait("cut_over_done", generation)
        self.sync(f"cut{generation}", len(membership.members))
        self.communicator.commit(generation)
        assert self.communicator.mode is Mode.LIVE
        return done[2]

    def init(self) -> None:
        """Form generation 1 and torch's default group; once."""
        if self.communicator.generation:
            return
        self.enter(1)
        init_process_group(self.communicator, self.index, self.size)

    def wait_board(self, name: str) -> None:
        """Until somebody has written `name`."""
        deadline = time.monotonic() + 60
        while name not in self.board:
            assert time.monotonic() < deadline, f"nobody wrote {name}"
            time.sleep(0.02)

    def gather_board(self, name: str, count: int) -> None:
        """A barrier of some of the fleet, outside of what is tested."""
        self.board[f"{name}:{self.index}"] = True
        deadline = time.monotonic() + 60
        while sum(key.startswith(f"{name}:") for key in self.board.keys()) < count:  # noqa: SIM118
            assert time.monotonic() < deadline, f"sync {name} timed out"
            time.sleep(0.02)

    def sync(self, name: str, count: int | None = None) -> None:
        """A barrier outside of what is tested."""
        if count is None or count == self.size:
            self.barrier.wait(60)
        else:
            self.gather_board(name, count)


def _main(
    fn: Callable[..., Any], index: int, size: int, board: Any, out: Any, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    arguments, enders = options.pop("arguments", ()), options.pop("enders", size)
    try:
        rank = Rank(index, size, board, **options)
        result = fn(rank, *arguments)
        out.put((index, "ok", result))
        rank.gather_board("end", enders)
        rank.communicator.close()
        rank.engine.stop(2)
    except BaseException:
        out.put((index, "failed", traceback.format_exc()))


def _next_result(
    out: Any, processes: list[Any], dying: tuple[int, ...], deadline: float
) -> tuple[int, Any]:
    while True:
        try:
            index, state, value = out.get(timeout=0.2)
        except queue.Empty:
            gone = [p.exitcode for i, p in enumerate(processes) if i not in dying]
            assert not any(gone), f"exit codes {gone}"
            assert time.monotonic() < deadline, "not all ranks have ended in time"
            continue
        assert state == "ok", f"rank {index}:\n{value}"
        return index, value


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.join(3)
        if process.is_alive():
            process.kill()


def run_ranks(
    size: int,
    fn: Callable[..., Any],
    *arguments: Any,
    machines: bool = True,
    timeout_s: float = 110.0,
    dying: tuple[int, ...] = (),
    **config: Any,
) -> list[Any]:
    """Results of `fn(rank, *arguments)` of each rank; raises with the first traceback."""
    context = warm.context()
    with context.Manager() as manager:
        board, out = manager.dict(), context.Queue()
        options = {"machines": machines, "arguments": arguments, **config}
        options["barrier"] = context.Barrier(size)
        processes = [
            context.Process(target=_main, args=(fn, index, size, board, out, dict(options)))
            for index in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        try:
            while len(results) < size - len(dying):
                index, value = _next_result(out, processes, dying, deadline)
                results[index] = value
        finally:
            board.update({f"end:{index}": True for index in dying})
            _end(processes)
        return [results.get(index) for index in range(size)]
