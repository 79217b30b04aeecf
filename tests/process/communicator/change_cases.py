"""Bodies of the tests of generations: replacement, abort, fencing, death, gates, control."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.waiting import eventually
from trainmover.communicator import Mode, init_process_group
from trainmover.communicator.incremental import core_partners
from trainmover.edges.errand import Errand
from trainmover.errors import (
    AuthenticationFailed,
    GenerationMismatch,
    LocalProtocolError,
    TransportError,
)

from .fleet import Rank


def total(rank: Rank, numel: int = 100_000) -> float:
    value = torch.full((numel,), float(rank.index + 1))
    dist.all_reduce(value)
    assert (value == value[0]).all()
    return value[0].item()


def replacement(rank: Rank) -> Any:
    """Ranks 0..3 are w0..w3; w4 replaces w2: only channels that touch w2 or w4 change."""
    communicator = rank.communicator
    if rank.index == 4:
        communicator.start_loopback(2, 4)
        init_process_group(communicator, 2, 4)
        looped = torch.full((10,), 3.0)
        dist.all_reduce(looped)
        assert looped.tolist() == [12.0] * 10 and not communicator.tainted
        group = dist.group.WORLD
        rank.wait_board("trained")
    else:
        membership = rank.membership(1, [0, 1, 2, 3])
        communicator.prepare(membership, rank.index)
        rank.events.wait("prepared", 1)
        rank.gather_board("p1", 4)
        communicator.cut_over(1)
        rank.events.wait("cut_over_done", 1)
        rank.gather_board("c1", 4)
        communicator.commit(1)
        init_process_group(communicator, rank.index, 4)
        group = dist.group.WORLD
        assert total(rank) == 10.0
        before = communicator.channels
        rank.gather_board("t1", 4)
        rank.board["trained"] = True
    if rank.index == 2:
        rank.wait_board("finished")
        return None
    membership = rank.membership(2, [0, 1, 4, 3])
    own = membership.rank_of(rank.incarnation)
    assert own is not None
    communicator.prepare(membership, own)
    rank.events.wait("prepared", 2)
    rank.gather_board("p2", 4)
    communicator.cut_over(2)
    count = rank.events.wait("cut_over_done", 2)[2]
    rank.gather_board("c2", 4)
    communicator.commit(2)
    assert communicator.mode is Mode.LIVE and dist.group.WORLD is group
    assert total(rank) == 1 + 2 + 5 + 4
    after = communicator.channels
    assert "w2" not in after
    if rank.index != 4:
        for peer, info in before.items():
            if peer != "w2":
                assert (after[peer].id, after[peer].fd) == (info.id, info.fd)
                assert after[peer].bytes_in >= info.bytes_in
        assert set(after) - set(before) == ({"w4"} if "w2" in before else set())
        assert count.inherited == len(set(before) - {"w2"}) and count.opened == len(
            set(after) - set(before)
        )
    rank.gather_board("done", 4)
    rank.board["finished"] = True
    return len(after)


def planned_abort(rank: Rank) -> Any:
    """Cut over and come back: the old generation goes on, its numbering as it was."""
    rank.init()
    communicator = rank.communicator
    assert total(rank) == 3.0
    info = communicator.channels
    for number in (2, 3):
        communicator.prepare(rank.membership(number), rank.index)
        rank.events.wait("prepared", number)
        rank.sync("a")
        communicator.cut_over(number)
        rank.events.wait("cut_over_done", number)
        rank.sync("b")
        if rank.index == 0:
            time.sleep(0.1)  # the other resumes the old generation first
        communicator.abort(number)
        communicator.abort(number)
        assert communicator.generation == 1 and communicator.mode is Mode.LIVE
        assert total(rank) == 3.0
    after = communicator.channels
    assert {p: i.id for p, i in after.items()} == {p: i.id for p, i in info.items()}
    rank.enter(4)
    assert total(rank) == 3.0
    try:
        communicator.prepare(rank.membership(3), rank.index)
    except GenerationMismatch:
        return True
    raise AssertionError("an old generation was prepared")


def gates(rank: Rank) -> Any:
    rank.init()
    communicator, r, n = rank.communicator, rank.index, rank.size
    for step in range(30):
        communicator.gate_contribute(step, 1, (r, -r, step * 10 + (r == step % n)))
        seen = rank.events.wait("gate_completed", 1, step)
        assert seen[3:] == (1, (n - 1, 0, step * 10 + 1)), seen
    try:
        communicator.gate_contribute(5, 1, (0,))
        raise AssertionError("entered twice")
    except LocalProtocolError:
        pass
    for peer in range(n):
        if peer in communicator._succession.current.ports:
            communicator.send_control(peer, 7, 3, f"from {r}".encode() * 5000)
    for peer in range(n):
        if peer != r:
            rank.events.wait("control", peer, 7, 1, 3, f"from {peer}".encode() * 5000)
    rank.sync("x")
    communicator.gate_contribute(100, 1 + (r == 0), (1,))
    if r == 1:
        assert "rank 0" in rank.events.wait("gate_mismatch", 1, 100)[3]
    rank.sync("y")
    return True


def mismatch(rank: Rank, who_is_late: int) -> Any:
    """Rank 1 finds out: by a message behind its own call, or by one that has come before it."""
    rank.init()
    if rank.index == who_is_late:
        rank.wait_board("called")
    if rank.index == who_is_late == 1:
        generation = rank.communicator._succession.current
        eventually(lambda: generation.called_elsewhere, "the other's message", timeout_s=60.0)
    if rank.index == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
    else:
        work = dist.broadcast(torch.ones(4, dtype=torch.float64), 0, async_op=True)
    rank.board["called"] = True
    if rank.index == 1:
        text = str(rank.events.wait("mismatch")[1])
        assert "all_reduce" in text and "broadcast" in text and "float64" in text, text
    rank.sync("seen")
    rank.communicator.break_generation("test")
    work.wait()
    return True


def is_closed(stream: socket.socket) -> bool:
    try:
        return stream.recv(10) == b""
    except ConnectionResetError:
        return True


def fencing(rank: Rank) -> Any:
    rank.init()
    communicator = rank.communicator
    if rank.index == 1:
        event = rank.events.wait("stream_accepted", "state", 1, "w0")
        assert event[4].recv(5) == b"hello"
        event[4].close()
        rank.sync("dialled")
        credentials = communicator._credentials
        credentials.config = replace(credentials.config, handshake_timeout_s=1.0)
        rank.sync("hasty from here on")
        rank.sync("end of streams")
        return True
    peer = rank.member(1, 1)
    stream = communicator.dial(peer, "state", 1, Errand("state", 30.0))
    assert stream.gettimeout() == 30.0
    stream.sendall(b"hello")
    stream.close()
    host, port = rank.board["member1"][2:]
    strange = socket.create_connection((host, port), timeout=30)
    strange.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert is_closed(strange)
    refused = []
    real = communicator._credentials.secret
    for secret, generation in ((b"wrong", 1), (real, 0)):
        communicator._credentials.secret = secret
        try:
            communicator.dial(peer, "state", generation, Errand("state", 30.0))
        except (AuthenticationFailed, GenerationMismatch, TransportError) as error:
            refused.append(type(error))
    communicator._credentials.secret = real
    rank.sync("dialled")
    rank.sync("hasty from here on")
    silent = socket.create_connection((host, port), timeout=30)
    assert is_closed(silent)  # closed by the handshake's time-out
    rank.sync("end of streams")
    assert refused == [AuthenticationFailed, GenerationMismatch], refused
    return True


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01)
        return index


def death_with_loader(rank: Rank) -> Any:
    """SIGKILL of a worker whose loader children live on, with all they have inherited: peers see
    it all the same. They are stopped, or they might end by themselves before anybody looks."""
    rank.init()
    if rank.index == 1:
        loader = torch.utils.data.DataLoader(Numbers(), num_workers=2)
        batches = iter(loader)
        for _ in range(2):  # one of each child: both have begun
            next(batches)
        for _ in range(20):  # forks while the I/O thread is busy
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        assert total(rank) == 3.0
        rank.board["children"] = [w.pid for w in batches._workers]
        for worker in batches._workers:
            os.kill(worker.pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    assert total(rank) == 3.0
    value = torch.full((1000,), 5.0)
    dist.all_reduce(value)  # the dead one never comes; the handler breaks, the work ends
    rank.events.wait("channel_broken")
    assert (value == 5).all() and rank.communicator.tainted
    alive = [pid for pid in rank.board["children"] if os.path.exists(f"/proc/{pid}")]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert len(alive) == 2, "the loader's children should have outlived their worker"
    assert rank.communicator.mode is Mode.RUN_OUT
    return True


def second_death(rank: Rank) -> Any:
    """Two peers die, the second when the generation is broken already: both are told by name."""
    rank.init()
    assert total(rank) == 10.0
    if rank.index > 1:
        rank.wait_board(f"dies{rank.index}")
        os.kill(os.getpid(), signal.SIGKILL)
    for victim in (2, 3):
        rank.gather_board(f"before{victim}", 2)
        rank.board[f"dies{victim}"] = True
        rank.events.wait("channel_broken", 1, f"w{victim}")
        assert rank.communicator.mode is Mode.RUN_OUT
    return True


def joiner_dies(rank: Rank) -> Any:
    """A joiner dies while its channels are opened: said by name; the old generation goes on."""
    communicator = rank.communicator
    if rank.index == 3:
        communicator.start_loopback(2, 3)
        rank.wait_board("go")
        os.kill(os.getpid(), signal.SIGKILL)
    rank.membership(1, [0, 1, 2])
    rank.enter(1, [0, 1, 2])
    init_process_group(communicator, rank.index, 3)
    assert total(rank) == 6.0
    if rank.index == 2:
        rank.gather_board("prepares", 3)
        rank.gather_board("aborted", 3)
        assert total(rank) == 6.0
        return True
    rank.gather_board("prepares", 3)
    communicator.prepare(rank.membership(2, [0, 1, 3]), rank.index)
    rank.board["go"] = True
    failed = rank.events.wait("prepare_failed", 2)
    assert failed[2] == "w3", failed
    communicator.abort(2)
    rank.gather_board("aborted", 3)
    assert communicator.generation == 1 and total(rank) == 6.0
    return True


def knock(rank: Rank) -> Any:
    """A pair that has never talked: the higher rank asks the lower one to connect, by talking."""
    rank.init()
    communicator = rank.communicator
    apart = [
        (low, high)
        for low in range(rank.size)
        for high in range(low + 1, rank.size)
        if high not in core_partners(communicator._succession.current.membership, low)
    ]
    assert apart, "every pair of this size is connected from the start"
    low, high = apart[0]
    if rank.index == high:
        assert f"w{low}" not in communicator.channels
        dist.send(torch.full((4,), 9.0), low)
    elif rank.index == low:
        assert f"w{high}" not in communicator.channels
        value = torch.zeros(4)
        dist.recv(value, high)
        assert value.tolist() == [9.0] * 4
    rank.sync("talked")
    if rank.index in (low, high):
        assert f"w{low + high - rank.index}" in communicator.channels
    return True


def reconnect(rank: Rank) -> Any:
    """A connection is reset; under a new number it is made again and no other one is touched."""
    rank.init()
    communicator = rank.communicator
    assert total(rank) == 6.0
    before = communicator.channels
    rank.sync("before the cut")
    if rank.index == 0:
        assert communicator.cut_channel("w1")
    deadline = time.monotonic() + 20
    while communicator.mode is not Mode.RUN_OUT:  # by the reset, or by a peer's poison
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rank.sync("broken")
    rank.enter(2)
    communicator.clear_taint()
    assert total(rank) == 6.0
    after = communicator.channels
    for peer, info in before.items():
        is_cut = {rank.incarnation, peer} == {"w0", "w1"}
        assert (after[peer].id != info.id) is is_cut, peer
    return True
