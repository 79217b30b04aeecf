"""What torch asks a process group about itself, and how a call is started.

Decides nothing about single collectives (group.py).
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from trainmover.communicator.answers import completed
from trainmover.communicator.call import Call, GroupPlace, Kind
from trainmover.communicator.communicator import Communicator
from trainmover.communicator.frames import group_id
from trainmover.communicator.operation import Operation
from trainmover.communicator.reductions import reduction
from trainmover.communicator.settings import CollectiveCall
from trainmover.errors import LocalProtocolError, ScriptError

BACKEND = "trainmover"
PYTHON_LEVEL = "distributed_c10d.py"
_GROUP_FILES = ("communicator/group.py", "communicator/group_identity.py")

Tensors = Sequence[torch.Tensor]

_c10d: Any = _distributed_c10d

# torch's stubs describe overloads no Python group can repeat, and leave some names out.
_WorkType: Any = _c10d.Work
_GroupType: Any = dist.ProcessGroup
work_of: Callable[[Any], Any] = _c10d._create_work_from_future


class Terms(NamedTuple):
    """What a call has beside its tensors."""

    op: Any = None
    root: int = 0
    numel: int | None = None
    """Agreed size, where outputs do not tell it."""
    opts: Any = None


class SourcedWork(_WorkType):  # type: ignore[misc]
    """Work of a receive from anybody: knows who sent."""

    def __init__(self, group: GroupIdentity, operation: Operation | None) -> None:
        super().__init__()
        self._group = group
        self._operation = operation
        self._wait = group._communicator.wait

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the message."""
        if self._operation is not None:
            self._wait(self._operation.future)
        return True

    def is_completed(self) -> bool:
        """Whether the message is here."""
        return self._operation is None or self._operation.future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        """The future behind this work."""
        return completed([]) if self._operation is None else self._operation.future

    def source_rank(self) -> int:
        """Rank in the group that sent."""
        if self._operation is None or self._operation.source < 0:
            return (self._group.rank() + 1) % self._group.size()
        return self._group.place.ranks.index(self._operation.source)

    _source_rank = source_rank


class GuardedWork(_WorkType):  # type: ignore[misc]
    """Work that Python code waits for: it helps, and a guard looks at what has come of it."""

    def __init__(self, future: torch.futures.Future[Any], communicator: Communicator) -> None:
        super().__init__()
        self._future = future
        self._wait = communicator.wait
        self._guard = communicator.after_wait

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the result. Raises what the guard raises."""
        self._wait(self._future)
        if self._guard is not None:
            self._guard()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Whether the result is here."""
        return self._future.done()

    is_success = is_completed

    def result(self) -> Any:
        """The outputs."""
        return self._future.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """The future behind this work."""
        return self._future


class GroupIdentity(_GroupType):  # type: ignore[misc]
    """The part of a process group that is not a collective."""

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        limit_s: float,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._communicator = communicator
        self.place = GroupPlace(name, group_id(name), ranks, rank, limit_s)
        self._name = name
        self._desc = "undefined"
        communicator.groups.add(self)

    # -- identity ------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the members, in group order."""
        return self.place.ranks

    def rank(self) -> int:
        """This process's rank in the group."""
        hook = self._communicator.on_rank_read
        if hook is not None:
            hook()
        return self.place.rank

    getRank = rank

    def size(self) -> int:
        """Number of ranks."""
        return self.place.size

    getSize = size

    def set_rank(self, rank: int) -> None:
        """Play another rank of this group from now on."""
        if not 0 <= rank < self.place.size:
            raise LocalProtocolError(f"rank {rank} in a group of {self.place.size}")
        self.place.rank = rank

    def follow(self, global_rank: int) -> None:
        """The process plays `global_rank` now; groups it is no member of stay as they are."""
        if global_rank in self.place.ranks:
            self.place.rank = self.place.ranks.index(global_rank)

    def name(self) -> str:
        """Name of the backend."""
        return BACKEND

    getBackendName = name
    _get_backend_name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self.place.name = name
        self.place.id = group_id(name)

    def _set_group_desc(self, description: str) -> None:
        self._desc = description

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    @property
    def group_name(self) -> str:
        """Name, equal on all ranks."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Description given at creation."""
        return self._desc

    def getGroupName(self) -> str:
        """Name, as torch's C++ side asks for it."""
        return self._name

    def getGroupDesc(self) -> str:
        """Description, as torch's C++ side asks for it."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    @property
    def supports_splitting(self) -> bool:
        """No native split; torch makes sub-groups by `new_group`."""
        return False

    @property
    def bound_device_id(self) -> None:
        """A CPU group is bound to no device."""
        return None

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Longest wait of a collective before its silent peer is reported."""
        self.place.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_backend(self, device: torch.device) -> GroupIdentity:
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._communicator.sequence_of(self.place)

    def _set_sequence_number_for_group(self) -> None:
        return

    def _wait_for_pending_works(self) -> None:
        return

    def abort(self) -> None:
        """Nothing to abort: the communicator ends works by itself."""

    def shutdown(self) -> None:
        """The communicator is closed by its owner."""

    def __repr__(self) -> str:
        return f"Group({self._name!r}, rank {self.place.rank} of {self.place.size})"

    # -- starting ------------------------------------------------------------

    def _call(
        self, kind: Kind, inputs: Tensors, outputs: Tensors, result: Any, terms: Terms
    ) -> Call:
        for tensor in (*inputs, *outputs):
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise ScriptError(
                    f"{kind.name.lower()} got a {tensor.layout} tensor on {tensor.device}; this "
                    "group moves dense CPU tensors"
                )
        call = Call(kind, self.place, list(inputs), list(outputs), result)
        call.root = terms.root
        if terms.op is not None:
            call.reduction = reduction(terms.op)
        if terms.opts is not None:
            call.timeout_s = _limit_s(terms.opts)
            call.is_awaited = not getattr(terms.opts, "asyncOp", True)
        numel = sum(t.numel() for t in outputs) if terms.numel is None else terms.numel
        call.seal(numel)
        return call

    def _start(self, call: Call) -> Any:
        self._observe(call)
        operation = self._communicator.start(call)
        if operation is None:
            return work_of(completed(call.result))
        return self._work(operation.future)

    def _work(self, future: torch.futures.Future[Any]) -> Any:
        if _is_called_from_python():
            return GuardedWork(future, self._communicator)
        return work_of(future)

    def _observe(self, call: Call) -> None:
        observer = self._communicator.observer
        if observer is None:
            return
        tensors = call.inputs or call.outputs
        observer(
            CollectiveCall(
                self._name,
                call.kind.name.lower(),
                tuple(tuple(tensor.shape) for tensor in tensors),
                tuple(str(tensor.dtype) for tensor in tensors),
                "" if call.reduction is None else call.reduction.name,
                self._communicator.sequence_of(self.place),
            )
        )

    def _in_turn(self, calls: Sequence[Call], result: Any) -> Any:
        """Several calls as one work."""
        operations = []
        for call in calls:
            self._observe(call)
            operation = self._communicator.start(call)
            if operation is not None:
                operations.append(operation.future)
        if not operations:
            return work_of(completed(result))
        gathered = torch.futures.collect_all(operations)
        return self._work(gathered.then(lambda _: result))


def _is_called_from_python() -> bool:
    """Whether torch's Python functions called this group: its C++ ones take works of C++ only."""
    frame = sys._getframe(3)
    while frame.f_code.co_filename.endswith(_GROUP_FILES) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.endswith(PYTHON_LEVEL)


def _limit_s(opts: Any) -> float | None:
    timeout = getattr(opts, "timeout", None)
    if isinstance(timeout, datetime.timedelta) and timeout.total_seconds() > 0:
        return timeout.total_seconds()
    return None
