"""Bodies of the tests of waiting: who is reported, who is excused."""

from __future__ import annotations

import datetime
import os
import re
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from trainmover.communicator import overdue as overdue_module
from trainmover.communicator.settings import Place

from .change_cases import total
from .fleet import Rank

LIMIT_S = 5.0
"""Of silence; a peer that was asked in time may stand still for some seconds before it answers."""


def is_told(event: tuple[Any, ...]) -> bool:
    """Whether it was waited for that long, and what the peer has answered counts all the while."""
    found = re.search(r"no data for (\d+) s", event[3])
    return found is not None and int(found.group(1)) >= LIMIT_S and "runs its script" in event[3]


def trusting(rank: Rank) -> None:
    """Answers count for longer than a process of this test may stand still."""
    overdue_module._FRESH_S = (30.0, 30.0)  # type: ignore[assignment]
    rank.init()


def overdue(rank: Rank) -> Any:
    """A peer that does not come is reported by name; nothing is thrown."""
    trusting(rank)
    if rank.index == 0:
        group = dist.group.WORLD
        group.set_timeout(datetime.timedelta(seconds=LIMIT_S))
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=LIMIT_S)
        work = group.allreduce([torch.ones(5)], options)
        event = rank.events.wait("channel_broken", 1, "w1")
        assert is_told(event), event
        work.wait()
    rank.sync("overdue")
    return True


def culprit(rank: Rank) -> Any:
    """Rank 0 hangs in its script: the one that waits for it says so, not who waits for that one."""
    trusting(rank)
    assert total(rank) == 10.0
    rank.events.breaks_on_loss = False
    if rank.index == 0:
        rank.wait_board("named")
    else:
        started = time.monotonic()
        work = dist.all_reduce(torch.ones(400_000), async_op=True)
        event = rank.events.wait("channel_broken") if rank.index == 1 else None
        if event is not None:
            assert event[2] == "w0" and is_told(event), event
            assert time.monotonic() - started >= LIMIT_S
            rank.board["named"] = True
        rank.wait_board("named")
        broken = [seen for seen in rank.events.seen if seen[0] == "channel_broken"]
        assert all(seen[2] == "w0" for seen in broken), broken
        rank.communicator.break_generation("test")
        work.wait()
    rank.sync("end of culprit")
    return True


def excused(rank: Rank) -> Any:
    """Rank 0 saves between two steps for longer than the limit; 2 waits for 1, which waits for 0.

    Nobody is reported; what the others wait for comes when rank 0 does.
    """
    rank.init()
    place = Place.INSIDE
    rank.communicator.show_place(lambda: place, lambda: ())
    assert total(rank) == 6.0
    if rank.index == 0:
        place = Place.OUTSIDE
        time.sleep(LIMIT_S + 1.0)
        place = Place.INSIDE
    value = torch.ones(3)
    if rank.index == 2:
        dist.recv(value, 1)
    elif rank.index == 1:
        dist.recv(value, 0)
        dist.send(value, 2)
    else:
        dist.send(value + 1, 1)
    assert rank.index == 0 or value.tolist() == [2.0] * 3
    assert total(rank) == 6.0
    if rank.index == 0:
        place = Place.OUTSIDE
        time.sleep(LIMIT_S + 1.0)
        rank.communicator.gate_contribute(7, 1, (0,))
    else:
        place = Place.AT_GATE
        rank.communicator.gate_contribute(7, 1, (0,))
    rank.events.wait("gate_completed", 1, 7)
    lost = [event for event in rank.events.seen if event[0] == "channel_broken"]
    assert not lost, lost
    return True


def stopped(rank: Rank) -> Any:
    """A peer that does not answer (SIGSTOP): its channel is given up, so that a new one is made."""
    rank.init()
    assert total(rank) == 3.0
    if rank.index == 1:
        rank.board["pid"] = os.getpid()
        rank.wait_board("woken")
        rank.events.wait("channel_broken")
        return True
    rank.wait_board("pid")
    os.kill(rank.board["pid"], signal.SIGSTOP)
    value = torch.ones(5)
    dist.all_reduce(value)
    event = rank.events.wait("channel_broken", 1, "w1")
    os.kill(rank.board["pid"], signal.SIGCONT)
    assert "does not answer" in event[3], event
    assert "w1" not in rank.communicator.channels
    rank.board["woken"] = True
    return True


def silent_gate(rank: Rank) -> Any:
    """A gate that nobody else enters names the rank whose frame is missing."""
    rank.init()
    if rank.index == 0:
        rank.communicator.gate_contribute(3, 1, (0,))
        event = rank.events.wait("channel_broken", 1, "w1")
        assert "gate 3" in event[3], event
    rank.sync("gate named")
    return True
