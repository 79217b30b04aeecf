"""torch's process group, answered by the communicator.

Decides how torch's many method names and argument shapes map to one `Call`; nothing about how a
call is carried out. Provides the names of torch 2.13 (`*_single`) and of older releases
(`_allgather_base` and friends). A group object lives through every change of generation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from trainmover.communicator.answers import completed
from trainmover.communicator.call import Call, Kind
from trainmover.communicator.communicator import Communicator
from trainmover.communicator.group_identity import (
    BACKEND,
    PYTHON_LEVEL,
    GroupIdentity,
    GuardedWork,
    SourcedWork,
    Tensors,
    Terms,
)
from trainmover.communicator.memory import write_back
from trainmover.communicator.untraced import keep_untraced
from trainmover.errors import ScriptError

_c10d: Any = _distributed_c10d


class Group(GroupIdentity):
    """A process group of one communicator."""

    # -- reductions ----------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None, timeout: Any = None) -> Any:
        """All-reduce of each tensor, in place."""
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        op = _operator(opts)
        calls = [
            self._call(Kind.ALL_REDUCE, [], [tensor], listed, Terms(op=op, opts=opts))
            for tensor in listed
        ]
        return self._start(calls[0]) if len(calls) == 1 else self._in_turn(calls, listed)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """All-reduce of several tensors as one work."""
        return self.allreduce(list(tensors), opts)

    def reduce(self, tensors: Tensors, opts: Any, *rest: Any) -> Any:
        """Reduce to one rank, in place there."""
        listed = list(tensors)
        call = self._call(
            Kind.REDUCE,
            [],
            listed[:1],
            listed,
            Terms(op=_operator(opts), root=opts.rootRank, opts=opts),
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
            Terms(op=_operator(opts), numel=numel, opts=opts),
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
            Terms(op=_operator(opts), numel=flat.numel(), opts=opts),
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
            calls.append(
                self._call(Kind.ALL_GATHER, [own], list(blocks), outputs, Terms(opts=opts))
            )
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
        call = self._call(Kind.ALL_GATHER, [own], blocks, [out], Terms(opts=opts))
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
            write_back(out, stand_in)
            return [out]

        done = completed([]) if operation is None else operation.future
        return self._work(done.then(put_back))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Several concatenating gathers as one work."""
        works = [
            self.all_gather_single(out, own, opts) for out, own in zip(outputs, inputs, strict=True)
        ]
        futures = torch.futures.collect_all([work.get_future() for work in works])
        return self._work(futures.then(lambda _: list(outputs)))

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
            Terms(root=opts.rootRank, numel=own.numel(), opts=opts),
        )
        return self._start(call)

    # -- distribution --------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any, *rest: Any) -> Any:
        """One rank's tensor everywhere, in place."""
        listed = list(tensors)
        call = self._call(
            Kind.BROADCAST, [], listed[:1], listed, Terms(root=opts.rootRank, opts=opts)
        )
        call.is_initialised = listed[0]._version > 0 or not _is_python_broadcast()
        return self._start(call)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        """One tensor of one rank's list to each rank."""
        is_root = self.place.rank == opts.rootRank
        blocks = list(inputs[0]) if is_root else []
        if is_root:
            self._same_count(Kind.SCATTER, blocks)
        call = self._call(
            Kind.SCATTER,
            blocks,
            list(outputs)[:1],
            list(outputs),
            Terms(root=opts.rootRank, opts=opts),
        )
        return self._start(call)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """One tensor from each rank to each rank."""
        self._same_count(Kind.ALL_TO_ALL, list(inputs))
        self._same_count(Kind.ALL_TO_ALL, list(outputs))
        call = self._call(
            Kind.ALL_TO_ALL, list(inputs), list(outputs), list(outputs), Terms(numel=0, opts=opts)
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
        call = self._call(Kind.ALL_TO_ALL, inputs, outputs, [out], Terms(numel=0, opts=opts))
        return self._start(call)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        """Nobody leaves before everybody has entered."""
        result = [torch.zeros(1)]
        return self._start(self._call(Kind.BARRIER, [], [], result, Terms(numel=0, opts=opts)))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier; who is missing is reported by the communicator's events."""
        self.barrier().wait()

    # -- point to point ------------------------------------------------------

    def send(self, tensors: Tensors, peer: int, tag: int) -> Any:
        """One tensor to one rank."""
        own = tensors[0]
        call = self._call(Kind.SEND, [own], [], list(tensors), Terms(root=peer, numel=own.nbytes))
        call.tag = tag
        return self._start(call)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> Any:
        """One tensor from one rank."""
        out = tensors[0]
        call = self._call(Kind.RECV, [], [out], list(tensors), Terms(root=peer, numel=out.nbytes))
        call.tag = tag
        return self._start(call)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """One tensor from whoever sends first; the work knows who did."""
        out = tensors[0]
        call = self._call(Kind.RECV_ANY, [], [out], list(tensors), Terms(numel=out.nbytes))
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


def _is_python_broadcast() -> bool:
    """Whether `dist.broadcast` of the script calls: its buffer may be fresh memory.

    torch's own C++ callers (DDP's reducer) fill theirs before they broadcast.
    """
    frame = sys._getframe(2)
    return frame.f_code.co_filename.endswith(PYTHON_LEVEL)


# -- registration ----------------------------------------------------------------

_registered: list[Communicator] = []
"""The communicator new groups belong to; torch's creator function takes no context."""


def register_backend(communicator: Communicator) -> None:
    """Make groups created from now on belong to `communicator`."""
    is_first = not _registered
    _registered[:] = [communicator]
    if is_first:
        keep_untraced(Group, GroupIdentity, GuardedWork, SourcedWork)
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
