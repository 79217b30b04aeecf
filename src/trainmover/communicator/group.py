"""torch's process group, answered by the communicator.

Decides how torch's many method names and argument shapes map to one `Call`; nothing about how a
call is carried out. Provides the names of torch 2.13 (`*_single`) and of older releases
(`_allgather_base` and friends). A group object lives through every change of generation.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from trainmover.communicator.call import Call, GroupPlace, Kind
from trainmover.communicator.communicator import Communicator, completed
from trainmover.communicator.frames import group_id
from trainmover.communicator.operation import Operation
from trainmover.communicator.reductions import reduction
from trainmover.communicator.settings import CollectiveCall
from trainmover.errors import LocalProtocolError, ScriptError

BACKEND = "trainmover"

Tensors = Sequence[torch.Tensor]

_c10d: Any = _distributed_c10d

# torch's stubs describe overloads no Python group can repeat, and leave some names out.
_WorkType: Any = _c10d.Work
_GroupType: Any = dist.ProcessGroup
_create_work_from_future: Callable[[Any], Any] = _c10d._create_work_from_future

_PYTHON_LEVEL = "distributed_c10d.py"


class SourcedWork(_WorkType):  # type: ignore[misc]
    """Work of a receive from anybody: knows who sent."""

    def __init__(self, group: Group, operation: Operation | None) -> None:
        super().__init__()
        self._group = group
        self._operation = operation

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the message."""
        if self._operation is not None:
            self._operation.future.wait()
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


class Group(_GroupType):  # type: ignore[misc]
    """A process group of one communicator."""

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

    def _get_backend(self, device: torch.device) -> Group:
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
        self,
        kind: Kind,
        inputs: Tensors,
        outputs: Tensors,
        result: Any,
        *,
        op: Any = None,
        root: int = 0,
        numel: int | None = None,
        opts: Any = None,
    ) -> Call:
        for tensor in (*inputs, *outputs):
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise ScriptError(
                    f"{kind.name.lower()} got a {tensor.layout} tensor on {tensor.device}; this "
                    "group moves dense CPU tensors"
                )
        call = Call(kind, self.place, list(inputs), list(outputs), result)
        call.root = root
        if op is not None:
            call.reduction = reduction(op)
        if opts is not None:
            call.timeout_s = _limit_s(opts)
        call.seal(sum(t.numel() for t in outputs) if numel is None else numel)
        return call

    def _start(self, call: Call) -> Any:
        self._observe(call)
        operation = self._communicator.start(call)
        if operation is None:
            return _create_work_from_future(completed(call.result))
        return _create_work_from_future(operation.future)

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
            return _create_work_from_future(completed(result))
        gathered = torch.futures.collect_all(operations)
        return _create_work_from_future(gathered.then(lambda _: result))

    # -- reductions ----------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Any:
        """All-reduce of each tensor, in place."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = _operator(opts)
        calls = [
            self._call(Kind.ALL_REDUCE, [], [tensor], listed, op=op, opts=opts) for tensor in listed
        ]
        return self._start(calls[0]) if len(calls) == 1 else self._in_turn(calls, listed)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """All-reduce of several tensors as one work."""
        return self.allreduce(list(tensors), opts)

    def reduce(self, tensors: Tensors, opts: Any, *rest: Any) -> Any:
        """Reduce to one rank, in place there."""
        listed = list(tensors)
        call = self._call(
            Kind.REDUCE, [], listed[:1], listed, op=_operator(opts), root=opts.rootRank, opts=opts
        )
        return self._start(call)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        """Reduce lists of tensors, one result per rank."""
        blocks, out = list(inputs[0]), outputs[0]
        self._same_count(Kind.REDUCE_SCATTER, blocks)
        numel = sum(block.numel() for block in blocks)
        call = self._call(
            Kind.REDUCE_SCATTER,
            blocks,
            [out],
            list(outputs),
            op=_operator(opts),
            numel=numel,
            opts=opts,
        )
        return self._start(call)

    def _scatter_call(self, out: torch.Tensor, flat: torch.Tensor, opts: Any) -> Call:
        size = self.place.size
        if flat.numel() != out.numel() * size:
            raise ScriptError(
                f"reduce_scatter: input has {flat.numel()} elements, expected output's "
                f"{out.numel()} times {size} ranks"
            )
        blocks = list(_dense_flat(flat).chunk(size)) if flat.numel() else [flat.reshape(-1)] * size
        return self._call(
            Kind.REDUCE_SCATTER,
            blocks,
            [out],
            [out],
            op=_operator(opts),
            numel=flat.numel(),
            opts=opts,
        )

    def reduce_scatter_single(self, out: torch.Tensor, flat: torch.Tensor, opts: Any = None) -> Any:
        """Reduce one tensor, one block of the result per rank."""
        return self._start(self._scatter_call(out, flat, opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Several single reduce-scatters as one work."""
        pairs = zip(outputs, inputs, strict=True)
        calls = [self._scatter_call(out, flat, opts) for out, flat in pairs]
        return self._in_turn(calls, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- gathers -------------------------------------------------------------

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Everybody's tensor, as a list."""
        calls = []
        for blocks, own in zip(outputs, inputs, strict=True):
            self._same_count(Kind.ALL_GATHER, list(blocks))
            calls.append(self._call(Kind.ALL_GATHER, [own], list(blocks), outputs, opts=opts))
        return self._start(calls[0]) if len(calls) == 1 else self._in_turn(calls, outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> Any:
        """Several gathers as one work: `outputs[rank][tensor]` in torch's (odd) order."""
        return self.allgather(outputs, inputs, opts)

    def _gather_call(self, out: torch.Tensor, own: torch.Tensor, opts: Any) -> tuple[Call, Any]:
        size = self.place.size
        if out.numel() != own.numel() * size:
            raise ScriptError(
                f"all_gather: output has {out.numel()} elements, expected input's {own.numel()} "
                f"times {size} ranks"
            )
        flat = _dense_flat(out)
        blocks = list(flat.chunk(size)) if flat.numel() else [flat] * size
        call = self._call(Kind.ALL_GATHER, [own], blocks, [out], opts=opts)
        is_direct = flat.numel() == 0 or flat.data_ptr() == out.data_ptr()
        return call, None if is_direct else flat

    def all_gather_single(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        """Everybody's tensor, concatenated."""
        call, stand_in = self._gather_call(out, own, opts)
        if stand_in is None:
            return self._start(call)
        self._observe(call)
        operation = self._communicator.start(call)

        def put_back(_: Any) -> list[torch.Tensor]:
            with torch.no_grad():
                out.detach().copy_(stand_in.view(out.shape))
            return [out]

        done = completed([]) if operation is None else operation.future
        return _create_work_from_future(done.then(put_back))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Several concatenating gathers as one work."""
        works = [
            self.all_gather_single(out, own, opts) for out, own in zip(outputs, inputs, strict=True)
        ]
        futures = torch.futures.collect_all([work.get_future() for work in works])
        return _create_work_from_future(futures.then(lambda _: list(outputs)))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        """Everybody's tensor on one rank."""
        own = inputs[0]
        blocks = list(outputs[0]) if outputs and self.place.rank == opts.rootRank else []
        if self.place.rank == opts.rootRank:
            self._same_count(Kind.GATHER, blocks)
        call = self._call(
            Kind.GATHER,
            [own],
            blocks,
            list(outputs),
            root=opts.rootRank,
            numel=own.numel(),
            opts=opts,
        )
        return self._start(call)

    # -- distribution --------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any, *rest: Any) -> Any:
        """One rank's tensor everywhere, in place."""
        listed = list(tensors)
        call = self._call(Kind.BROADCAST, [], listed[:1], listed, root=opts.rootRank, opts=opts)
        call.is_initialised = listed[0]._version > 0 or not _is_python_broadcast()
        return self._start(call)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        """One tensor of one rank's list to each rank."""
        is_root = self.place.rank == opts.rootRank
        blocks = list(inputs[0]) if is_root else []
        if is_root:
            self._same_count(Kind.SCATTER, blocks)
        call = self._call(
            Kind.SCATTER, blocks, list(outputs)[:1], list(outputs), root=opts.rootRank, opts=opts
        )
        return self._start(call)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """One tensor from each rank to each rank."""
        self._same_count(Kind.ALL_TO_ALL, list(inputs))
        self._same_count(Kind.ALL_TO_ALL, list(outputs))
        call = self._call(
            Kind.ALL_TO_ALL, list(inputs), list(outputs), list(outputs), numel=0, opts=opts
        )
        return self._start(call)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        """Blocks of the first dimension, one to each rank."""
        size = self.place.size
        outputs = _split(out, output_split_sizes, size, "output")
        inputs = _split(own.contiguous(), input_split_sizes, size, "input")
        call = self._call(Kind.ALL_TO_ALL, inputs, outputs, [out], numel=0, opts=opts)
        return self._start(call)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Nobody leaves before everybody has entered."""
        result = [torch.zeros(1)]
        return self._start(self._call(Kind.BARRIER, [], [], result, numel=0, opts=opts))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier; who is missing is reported by the communicator's events."""
        self.barrier().wait()

    # -- point to point ------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> Any:
        """One tensor to one rank."""
        own = tensors[0]
        call = self._call(Kind.SEND, [own], [], list(tensors), root=peer, numel=own.nbytes)
        call.tag = tag
        return self._start(call)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Any:
        """One tensor from one rank."""
        out = tensors[0]
        call = self._call(Kind.RECV, [], [out], list(tensors), root=peer, numel=out.nbytes)
        call.tag = tag
        return self._start(call)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """One tensor from whoever sends first; the work knows who did."""
        out = tensors[0]
        call = self._call(Kind.RECV_ANY, [], [out], list(tensors), numel=out.nbytes)
        call.tag = tag
        self._observe(call)
        return SourcedWork(self, self._communicator.start(call))

    def _same_count(self, kind: Kind, blocks: list[torch.Tensor]) -> None:
        if len(blocks) != self.place.size:
            raise ScriptError(
                f"{kind.name.lower()} got {len(blocks)} tensors, expected one per rank: "
                f"{self.place.size}"
            )


def _dense_flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _split(
    tensor: torch.Tensor, sizes: Sequence[int] | None, count: int, name: str
) -> list[torch.Tensor]:
    flat = tensor.detach()
    if sizes:
        if len(sizes) != count or sum(sizes) != flat.shape[0]:
            raise ScriptError(
                f"all_to_all: {name} splits {list(sizes)} must be {count} numbers that add up to "
                f"{flat.shape[0]}"
            )
        return list(flat.split(list(sizes)))
    if flat.shape[0] % count:
        raise ScriptError(
            f"all_to_all: {name} dimension {flat.shape[0]} is not divisible by {count} ranks"
        )
    return list(flat.split(flat.shape[0] // count)) if flat.shape[0] else [flat] * count


def _operator(opts: Any) -> Any:
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _limit_s(opts: Any) -> float | None:
    timeout = getattr(opts, "timeout", None)
    if isinstance(timeout, datetime.timedelta) and timeout.total_seconds() > 0:
        return timeout.total_seconds()
    return None


def _is_python_broadcast() -> bool:
    """Whether `dist.broadcast` of the script calls: its buffer may be fresh memory.

    torch's own C++ callers (DDP's reducer) fill theirs before they broadcast.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_filename.endswith(_PYTHON_LEVEL)


# -- registration ----------------------------------------------------------------

_registered: list[Communicator] = []
"""The communicator new groups belong to; torch's creator function takes no context."""


def register_backend(communicator: Communicator) -> None:
    """Make groups created from now on belong to `communicator`."""
    is_first = not _registered
    _registered[:] = [communicator]
    if is_first:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Group:
    communicator = _registered[0]
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    limit_s = options.timeout.total_seconds()
    return Group(communicator, options.group_id, ranks, options.group_rank, limit_s)


def init_process_group(communicator: Communicator, rank: int, world_size: int) -> None:
    """torch's default group, answered by `communicator`; connects nobody by itself."""
    register_backend(communicator)
    create: Callable[..., None] = dist.init_process_group
    create(backend=BACKEND, store=_c10d.HashStore(), rank=rank, world_size=world_size)
