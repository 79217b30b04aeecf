"""Collectives against Gloo, in one run, rounds interleaved.

Decides how the comparison is made: the same ranks, tensors and calls for both, alternating round
by round, so that a disturbed machine disturbs both; the lower quartile of each is compared.
`local`: all ranks play one machine (shared memory); else each its own (sockets only).
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import Empty
from typing import Any

import torch
import torch._C._distributed_c10d as c10d_untyped
import torch.distributed as dist

from trainmover.communicator.communicator import Communicator
from trainmover.communicator.engine import Engine
from trainmover.communicator.group import init_process_group
from trainmover.communicator.settings import (
    ChannelCount,
    ChannelIdentity,
    CommunicatorConfig,
    Mode,
)
from trainmover.errors import CollectiveMismatch, TransportError
from trainmover.topology import Member, Membership

_c10d: Any = c10d_untyped

_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Newer torch's names: the older ones warn there at each call."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
DEFAULT_SIZES = tuple(1024 * 4**power for power in range(9))
"""1 KiB to 64 MiB."""
_SECRET = b"bench"
_START_TIMEOUT_S = 120.0
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One round: the slowest rank's seconds per call."""

    backend: str
    collective: str
    ranks: int
    bytes: int
    round: int
    seconds: float
    is_local: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """What one fleet of the bench measures."""

    ranks: int
    sizes: tuple[int, ...]
    rounds: int
    is_local: bool
    collectives: tuple[str, ...] = COLLECTIVES


class _Events:
    """The bench forms one generation and ends when anything breaks."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.is_over = False

    def channel_broken(self, generation: int, peer: str, reason: str) -> None:
        if self.is_over:  # peers close their ends in any order
            return
        raise TransportError(f"bench: channel to {peer} broke: {reason}")

    def poisoned(self, generation: int, peer: str, edges: tuple[tuple[str, str], ...]) -> None:
        raise TransportError(f"bench: {peer} broke the generation")

    def gate_completed(self, generation: int, step: int, kind: int, flags: tuple[int, ...]) -> None:
        """The bench enters no gates."""

    def gate_mismatch(self, generation: int, step: int, detail: str) -> None:
        """The bench enters no gates."""

    def control(
        self, from_rank: int, kind: int, generation: int, step: int, payload: bytes
    ) -> None:
        """The bench sends no control messages."""

    def next_generation_frame(self, generation: int) -> None:
        """All ranks commit together."""

    def prepared(self, generation: int) -> None:
        self.seen.add("prepared")

    def prepare_failed(self, generation: int, peer: str, reason: str) -> None:
        raise TransportError(f"bench: no channel to {peer}: {reason}")

    def cut_over_done(self, generation: int, channels: ChannelCount) -> None:
        self.seen.add("cut_over")

    def cut_over_failed(self, generation: int, peer: str, reason: str) -> None:
        raise TransportError(f"bench: {peer} did not cut over: {reason}")

    def stream_accepted(self, purpose: str, generation: int, peer: str, stream: Any) -> None:
        stream.close()

    def mismatch(self, error: CollectiveMismatch) -> None:
        raise error

    def wait(self, name: str) -> None:
        """Until `name` was seen."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while name not in self.seen:
            if time.monotonic() > deadline:
                raise TransportError(f"bench: not {name} after {_START_TIMEOUT_S} s")
            time.sleep(0.005)


def _join(rank: int, plan: BenchPlan, events: _Events, store: Any, barrier: Any) -> Communicator:
    engine = Engine()
    engine.start()
    machine = "m0" if plan.is_local else f"m{rank}"
    identity = ChannelIdentity("bench", f"w{rank}", machine)
    config = CommunicatorConfig(connect_timeout_s=30.0)
    communicator = Communicator(engine, identity, _SECRET, events, config)
    store.set(f"address{rank}", f"{communicator.address[0]}:{communicator.address[1]}")
    members = []
    for peer in range(plan.ranks):
        host, port = store.get(f"address{peer}").decode().rsplit(":", 1)
        peer_machine = "m0" if plan.is_local else f"m{peer}"
        members.append(
            Member(
                rank=peer, incarnation=f"w{peer}", machine=peer_machine, host=host, port=int(port)
            )
        )
    communicator.prepare(Membership(generation=1, members=tuple(members)), rank)
    events.wait("prepared")
    barrier.wait(_START_TIMEOUT_S)
    communicator.cut_over(1)
    events.wait("cut_over")
    barrier.wait(_START_TIMEOUT_S)
    communicator.commit(1)
    assert communicator.mode is Mode.LIVE
    init_process_group(communicator, rank, plan.ranks)
    return communicator


def _body(group: Any, collective: str, ranks: int, count: int) -> Callable[[], Any]:
    """One call of a collective whose total payload is `count` floats, as a script makes it."""
    share = max(1, count // ranks)
    whole = torch.ones(share * ranks if collective != "all_reduce" else count)
    part = torch.ones(share)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_gather":
        return lambda: _gather(whole, part, group=group)
    if collective == "reduce_scatter":
        return lambda: _scatter(part, whole, group=group)
    return lambda: dist.broadcast(whole, group=group, group_src=0)


def _calls(nbytes: int) -> int:
    return 20 if nbytes <= 65536 else 4 if nbytes <= _LARGE_BYTES else 1


def gloo_group(store: Any, rank: int, size: int) -> Any:
    """A group as `init_process_group("gloo")` makes it, beside the default one."""
    store = _c10d.PrefixStore("gloo", store)
    group: Any = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=60))
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group


def _rounds(
    bodies: dict[str, Callable[[], Any]], plan: BenchPlan, nbytes: int, barrier: Any
) -> list[tuple[str, int, float]]:
    """(backend, round, seconds per call); the first round warms up and is not kept."""
    measured = []
    for at in range(-1, plan.rounds):
        for name, body in bodies.items():
            barrier.wait(_START_TIMEOUT_S)
            started = time.perf_counter()
            for _ in range(_calls(nbytes)):
                body()
            measured.append((name, at, (time.perf_counter() - started) / _calls(nbytes)))
    return [entry for entry in measured if entry[1] >= 0]


def _work(rank: int, plan: BenchPlan, port: int, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)
    store = _c10d.TCPStore("127.0.0.1", port, plan.ranks, False)
    events = _Events()
    communicator = _join(rank, plan, events, store, barrier)
    groups = {"trainmover": dist.group.WORLD, "gloo": gloo_group(store, rank, plan.ranks)}
    samples = []
    for collective in plan.collectives:
        for nbytes in plan.sizes:
            bodies = {
                name: _body(group, collective, plan.ranks, max(1, nbytes // 4))
                for name, group in groups.items()
            }
            rounds = _rounds(bodies, plan, nbytes, barrier)
            samples += [(name, collective, nbytes, at, time_s) for name, at, time_s in rounds]
    results.put(samples)
    events.is_over = True
    barrier.wait(_START_TIMEOUT_S)
    communicator.close()


def _fleet(plan: BenchPlan) -> list[Sample]:
    context = multiprocessing.get_context("spawn")
    store = _c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    barrier, results = context.Barrier(plan.ranks), context.Queue()
    processes = [
        context.Process(target=_work, args=(rank, plan, store.port, barrier, results))
        for rank in range(plan.ranks)
    ]
    for process in processes:
        process.start()
    slowest: dict[tuple[str, str, int, int], float] = {}
    try:
        for _ in processes:
            for name, collective, nbytes, round_, seconds in _take(results, processes):
                key = (name, collective, nbytes, round_)
                slowest[key] = max(slowest.get(key, 0.0), seconds)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return [
        Sample(name, collective, plan.ranks, nbytes, round_, seconds, plan.is_local)
        for (name, collective, nbytes, round_), seconds in slowest.items()
    ]


def _take(results: Any, processes: Sequence[Any]) -> Any:
    while True:
        try:
            return results.get(timeout=0.5)
        except Empty:
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise TransportError(f"a rank of the bench ended early: {codes}") from None


def run_collectives_bench(
    ranks: Sequence[int], sizes: Sequence[int], rounds: int, local: bool
) -> list[dict[str, Any]]:
    """Raw samples of all collectives, sizes and numbers of ranks, ours and Gloo's.

    Blocks: minutes at the default sizes.
    """
    samples: list[Sample] = []
    for count in ranks:
        plan = BenchPlan(ranks=count, sizes=tuple(sizes), rounds=rounds, is_local=local)
        samples.extend(_fleet(plan))
    return [asdict(sample) for sample in samples]


def lower_quartile(values: Sequence[float]) -> float:
    """The value a quarter of the way up."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def ratios(samples: Sequence[dict[str, Any]]) -> dict[tuple[str, int, int], float]:
    """Our lower quartile over Gloo's by (collective, ranks, bytes); under 1 is faster."""
    times: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for sample in samples:
        key = (sample["collective"], sample["ranks"], sample["bytes"])
        times.setdefault(key, {}).setdefault(sample["backend"], []).append(sample["seconds"])
    return {
        key: lower_quartile(by_backend["trainmover"]) / lower_quartile(by_backend["gloo"])
        for key, by_backend in times.items()
    }


def summary(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Worst and median ratio of sockets and, prefixed ``local_``, of shared memory."""
    result: dict[str, float] = {}
    for prefix, is_local in (("", False), ("local_", True)):
        chosen = [sample for sample in samples if sample["is_local"] is is_local]
        values = sorted(ratios(chosen).values())
        if values:
            result[f"{prefix}worst_ratio_vs_gloo"] = values[-1]
            result[f"{prefix}median_ratio_vs_gloo"] = values[len(values) // 2]
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m trainmover.communicator.bench`: one JSON line per collective and size."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default=",".join(map(str, DEFAULT_SIZES)))
    parser.add_argument("--local", action="store_true", help="all ranks on one machine")
    chosen = parser.parse_args(arguments)
    sizes = [int(size) for size in chosen.sizes.split(",")]
    samples = run_collectives_bench([chosen.ranks], sizes, chosen.rounds, chosen.local)
    cases: dict[tuple[str, int], dict[str, list[float]]] = {}
    for sample in samples:
        times = cases.setdefault((sample["collective"], sample["bytes"]), {})
        times.setdefault(sample["backend"], []).append(sample["seconds"])
    for (collective, nbytes), times in cases.items():
        case = {
            "collective": collective,
            "bytes": nbytes,
            "ours_s": times["trainmover"],
            "gloo_s": times["gloo"],
        }
        print(json.dumps(case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
