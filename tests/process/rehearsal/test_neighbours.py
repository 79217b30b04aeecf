"""Collectives inside a standby's machine: real among its workers, and bounded always."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainmover.communicator import ChannelIdentity, CommunicatorConfig, Engine
from trainmover.communicator.call import Call, GroupPlace, Kind
from trainmover.communicator.reductions import reduction
from trainmover.errors import TransportError
from trainmover.rehearsal.neighbours import Neighbours, Place

pytestmark = [pytest.mark.timeout(60)]

NAMES = ("m4.0.1", "m4.1.2")
LIMIT_S = 30.0


def neighbour(engine: Engine, folder: Path, index: int, *, wait_s: float = 20.0) -> Neighbours:
    place = Place(folder=folder, host="127.0.0.1", secret=b"s", meeting="0", wait_s=wait_s)
    identity = ChannelIdentity("job", NAMES[index], "m4")
    return Neighbours(engine, identity, NAMES, place, CommunicatorConfig())


def sum_of(value: float, rank: int) -> Call:
    """An all-reduce among ranks 6 and 7: the last machine of four."""
    tensor = torch.full((3,), value)
    group = GroupPlace("tensor", 77, (6, 7), rank, 60.0)
    call = Call(Kind.ALL_REDUCE, group, [tensor], [tensor], [tensor])
    call.reduction = reduction(torch.distributed.ReduceOp.SUM)
    call.seal(tensor.numel())
    return call


def side_by_side(*acts: Callable[[], None]) -> None:
    """Run them as the workers of a machine do; what one raises is raised here."""
    failed: list[BaseException] = []

    def guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    if failed:
        raise failed[0]


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine(), Engine()]
    for engine in made:
        engine.start()
    yield made
    for engine in made:
        engine.stop(5.0)


def test_neighbours_talk_and_one_that_leaves_is_not_waited_for(
    engines: list[Engine], tmp_path: Path
) -> None:
    both = [neighbour(engine, tmp_path, index) for index, engine in enumerate(engines)]
    sums: dict[int, torch.Tensor] = {}

    def part(rank: int) -> Callable[[], None]:
        def act() -> None:
            both[rank].open()
            call = sum_of(1.0 + rank, rank)
            operation = both[rank].start(call)
            if operation is not None:
                operation.future.wait()
            sums[rank] = call.outputs[0]

        return act

    side_by_side(part(0), part(1))
    assert [value.tolist() for value in sums.values()] == [[3.0] * 3] * 2
    assert [each.trouble for each in both] == ["", ""]
    both[0].close()
    call = sum_of(5.0, 1)
    operation = both[1].start(call)
    if operation is not None:
        operation.future.wait()
    assert both[1].trouble
    both[1].close()


def test_a_neighbour_that_does_not_come_is_named(engines: list[Engine], tmp_path: Path) -> None:
    alone = neighbour(engines[0], tmp_path, 0, wait_s=0.1)
    with pytest.raises(TransportError, match=r"m4\.1\.2 did not come to rehearse"):
        alone.open()
    alone.close()
