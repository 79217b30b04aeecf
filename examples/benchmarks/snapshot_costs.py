"""What a snapshot costs, tier by tier, beside the usual ways to save the same state.

One process, no job: a model with AdamW state of the given size. Prints one JSON object per line.
The worker's own code takes the snapshots; an agent's own store and server keep and send them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._C._distributed_c10d import HashStore

from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.writer import write_rank
from trainmover.daemons.own_disks import OwnDisk
from trainmover.edges.snapshot_client import Holder, fetching, give
from trainmover.edges.snapshot_server import SnapshotServer
from trainmover.edges.snapshot_store import Kept, SnapshotStore
from trainmover.protocol.messages import JobSpec, SnapshotTaken, Version
from trainmover.topology.keeping import Keeping
from trainmover.worker import orders
from trainmover.worker.plain import PlainHost
from trainmover.worker.sequence import SequenceWatch
from trainmover.worker.snapshot_side import SnapshotSide
from trainmover.worker.stepper import Stepper

SECRET = b"benchmark" * 4
LIMIT_S = 60.0
MIB = 1 << 20


class Blocks(nn.Module):
    """Tensors as a transformer has them: large matrices, and many small vectors."""

    def __init__(self, size_mib: int) -> None:
        super().__init__()
        width = 512
        block_bytes = 4 * (12 * width * width + 13 * width)
        count = max(1, size_mib * MIB // 3 // block_bytes)  # parameters and two moments
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 2048) for _ in range(count)
        )


class BenchHost(PlainHost):
    """A process with an agent's memory, without an agent."""

    def __init__(self) -> None:
        super().__init__(0)
        spec = JobSpec(job="bench", run_id="bench", script="", world_size=1, workers_per_machine=1)
        self.snapshots = SnapshotSide("m0", spec, SECRET, LIMIT_S)
        self.taken: list[SnapshotTaken] = []

    def tell(self, message: Any) -> None:
        """Keep what would go to the agent."""
        if isinstance(message, SnapshotTaken):
            self.taken.append(message)
        else:
            super().tell(message)


class Rank:
    """One rank's objects and its snapshots."""

    def __init__(self, size_mib: int) -> None:
        torch.manual_seed(1)
        self.model = Blocks(size_mib)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.host = BenchHost()
        entry = orders.RunMain(rank=0, world_size=1, is_loopback=False, attempts=-1)
        self.stepper = Stepper(self.host, entry, SequenceWatch())
        self.stepper.track({"model": self.model, "optimizer": self.optimizer}, ())
        self.stepper.rearm()
        self.bytes = self.stepper.inventory.manifest().total_bytes

    def snapshot(self) -> SnapshotTaken:
        """One, as at a boundary."""
        step = self.stepper.version.step + 1
        self.stepper.version = Version(step=step, lineage=1)
        self.stepper.snapshots.ask(1, is_suspect=False)
        self.stepper.snapshots.take_if_asked()
        return self.host.taken[-1]

    def state(self) -> dict[str, Any]:
        """For torch's own savers."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def tell(what: str, **values: object) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def raw_copy(size: int) -> Callable[[], object]:
    """A copy of as many bytes into memory of the same kind that has been touched before."""
    fd = os.memfd_create("raw")
    os.ftruncate(fd, size)
    target = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    os.close(fd)
    source = torch.ones(size, dtype=torch.uint8)
    target.copy_(source)
    return lambda: target.copy_(source)


def memory(rank: Rank, rounds: int) -> Kept:
    """Blocking time against a raw copy, by turns; the first ones, with their page faults, apart."""
    store, copy = SnapshotStore(), raw_copy(rank.bytes)
    kept: Kept | None = None
    for number in range(rounds + 2):
        copied_s = timed(copy)
        taken = rank.snapshot()
        kept = store.open_own(taken)
        kept_s = timed(partial(store.check, kept))
        store.drop(kept.version, ())
        tell(
            "memory",
            is_first=number < 2,
            blocked_s=taken.blocked_s,
            copy_s=copied_s,
            kept_s=taken.blocked_s + kept_s,
            bytes=rank.bytes,
        )
    assert kept is not None
    return kept


def peer(kept: Kept, rounds: int) -> None:
    """To another agent's memory through a socket, and back."""
    for number in range(rounds):
        store = SnapshotStore()
        disk = OwnDisk("m0", Keeping)
        server = SnapshotServer("127.0.0.1", store, lambda: SECRET, lambda: None, LIMIT_S, disk)
        holder = Holder(host="127.0.0.1", port=server.port, secret=SECRET, limit_s=LIMIT_S)
        started = time.perf_counter()
        give(holder, kept)
        given_s = time.perf_counter() - started
        tell("peer", is_first=number == 0, given_s=given_s, fetched_s=fetch_all(holder, kept))
        server.close()


def fetch_all(holder: Holder, kept: Kept) -> float:
    """Seconds to have all bytes again."""
    buffer = memoryview(bytearray(max(entry.size_bytes for entry in kept.description.entries)))
    started = time.perf_counter()
    with fetching(holder, kept.rank, kept.version) as fetch:
        for entry in fetch.description.entries:
            fetch.read(entry, buffer[: entry.size_bytes])
        fetch.end()
    return time.perf_counter() - started


def durable(kept: Kept, folder: Path, rounds: int) -> None:
    """Our writer against one raw file of the same size, both to the medium."""
    told = kept.description
    for number in range(rounds):
        state = RankState(
            rank=0,
            world_size=1,
            step=number,
            lineage=1,
            generation=1,
            identity=told.identity,
            entries=told.entries,
            personal=told.personal,
            shared=told.shared,
            bulk_digest=kept.bulk_digest,
            run_id="bench",
        )
        store = open_store(folder / "checkpoints")
        seconds = {}
        # By turns: the medium's cache favours whoever comes second.
        for which in ("raw_s", "written_s") if number % 2 else ("written_s", "raw_s"):
            started = time.perf_counter()
            if which == "raw_s":
                write_raw(folder / f"raw{number}", kept.bulk())
            else:
                write_rank(store, state, kept.bulk())
            seconds[which] = time.perf_counter() - started
        tell("durable", **seconds)


def write_raw(path: Path, data: memoryview) -> None:
    """One file, as plainly as it goes."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _save(rank: Rank, path: str) -> None:
    torch.save(rank.state(), path)


def _save_parts(rank: Rank, path: str) -> None:
    dcp.save(rank.state(), checkpoint_id=path)


def usual(rank: Rank, folder: Path, rounds: int) -> None:
    """The usual savers: how long they block, and how long until all is written."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    for number in range(rounds):
        path = folder / f"usual{number}"
        saved_s = timed(partial(_save, rank, f"{path}.pt"))
        os.unlink(f"{path}.pt")
        tell("torch.save", blocked_s=saved_s, total_s=saved_s)
        saved_s = timed(partial(_save_parts, rank, f"{path}.dcp"))
        tell("dcp.save", blocked_s=saved_s, total_s=saved_s)
        started = time.perf_counter()
        future: Any = dcp.async_save(rank.state(), checkpoint_id=f"{path}.async")
        blocked_s = time.perf_counter() - started
        future.result()
        tell("dcp.async_save", blocked_s=blocked_s, total_s=time.perf_counter() - started)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size-mib", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    args.folder.mkdir(parents=True, exist_ok=True)
    rank = Rank(args.size_mib)
    kept = memory(rank, 2 * args.rounds)
    peer(kept, args.rounds)
    durable(kept, args.folder, args.rounds)
    usual(rank, args.folder, args.rounds)


if __name__ == "__main__":
    main()
