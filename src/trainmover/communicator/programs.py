"""Which program carries out which collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainmover.communicator import collectives, movement
from trainmover.communicator.call import Kind
from trainmover.communicator.operation import Operation, Program
from trainmover.communicator.settings import CommunicatorConfig

PROGRAMS: Final[dict[Kind, Callable[[Operation, CommunicatorConfig], Program]]] = {
    Kind.ALL_REDUCE: collectives.all_reduce,
    Kind.REDUCE: collectives.reduce,
    Kind.REDUCE_SCATTER: collectives.reduce_scatter,
    Kind.ALL_GATHER: movement.all_gather,
    Kind.BROADCAST: movement.broadcast,
    Kind.GATHER: movement.gather,
    Kind.SCATTER: movement.scatter,
    Kind.ALL_TO_ALL: movement.all_to_all,
    Kind.BARRIER: movement.barrier,
    Kind.SEND: movement.send,
    Kind.RECV: movement.receive,
    Kind.RECV_ANY: movement.receive_any,
}
