"""Local answers: what a collective returns when there is nobody to ask.

Decides values only. In loop-back (a standby without a role) each collective is answered as if
every peer had sent what this rank sent. While running out, with this rank's own input where that
has the output's meaning. In both, zeros for the rest: memory that was never written must not
reach an embedding's index or a loop's condition. A rehearsal with a recording hands the values
in. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainmover.communicator.call import Call, Kind
from trainmover.communicator.memory import dense, plain
from trainmover.communicator.reductions import Reduction, arithmetic_view


def _assign(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values where sizes agree, else zeros; whatever the target's layout or mode."""
    if target.numel() == 0:
        return
    if source.numel() != target.numel():
        _clear(target)
        return
    if dense(target) is target:
        plain(target).copy_(source.detach().reshape(-1))
    else:
        with torch.inference_mode():
            target.detach().copy_(source.detach().reshape(target.shape))


def _clear(target: torch.Tensor) -> None:
    if target.numel() == 0:
        return
    if dense(target) is target:
        plain(target).view(torch.uint8).zero_()
    else:
        with torch.inference_mode():
            target.detach().zero_()


def _as_if_all_sent(values: torch.Tensor, chosen: Reduction, count: int) -> torch.Tensor:
    """Reduction of `count` copies of `values`."""
    result = arithmetic_view(dense(values).detach().clone().reshape(-1), chosen)
    chosen.prescale(result)
    if chosen.name in ("SUM", "PREMUL_SUM") and result.dtype != torch.bool:
        result.mul_(count)
    elif chosen.name == "PRODUCT":
        single = result.clone()
        for _ in range(count - 1):
            result.mul_(single)
    elif chosen.name == "BXOR" and count % 2 == 0:
        result.zero_()
    return result.view(values.dtype)


def loop_back(call: Call) -> None:
    """Answer `call` as if every peer had sent what this rank sent."""
    rank, size = call.group.rank, call.group.size
    with torch.no_grad():
        if call.kind in (Kind.ALL_REDUCE, Kind.REDUCE):
            assert call.reduction is not None
            _assign(call.outputs[0], _as_if_all_sent(call.outputs[0], call.reduction, size))
        elif call.kind is Kind.REDUCE_SCATTER:
            assert call.reduction is not None
            own = call.inputs[rank]
            _assign(call.outputs[0], _as_if_all_sent(own, call.reduction, size))
        else:
            _move(call, has_touched=False)


def recorded(call: Call, kept: Sequence[torch.Tensor]) -> None:
    """Answer `call` with the outputs that another process got for the same one."""
    with torch.no_grad():
        for output, value in zip(call.outputs, kept, strict=True):
            _assign(output, value)


def zeros(call: Call) -> None:
    """Answer `call` with zeros: valid memory, and not good enough (an assertion may fail)."""
    with torch.no_grad():
        for output in call.outputs:
            _clear(output)


def run_out(call: Call, has_touched: bool) -> None:
    """Answer `call` of a broken generation; `has_touched`: the result's memory is torn."""
    with torch.no_grad():
        if call.kind in (Kind.ALL_REDUCE, Kind.REDUCE):
            if has_touched:
                _clear(call.outputs[0])
        elif call.kind is Kind.REDUCE_SCATTER:
            _assign(call.outputs[0], call.inputs[call.group.rank])
        else:
            _move(call, has_touched)


def _move(call: Call, has_touched: bool) -> None:
    """Collectives without arithmetic; the same in loop-back and run-out."""
    rank = call.group.rank
    if call.kind in (Kind.ALL_GATHER, Kind.GATHER):
        for output in call.outputs:
            _assign(output, call.inputs[0])
    elif call.kind is Kind.BROADCAST:
        if rank != call.root and (has_touched or not call.is_initialised):
            _clear(call.outputs[0])
    elif call.kind is Kind.SCATTER:
        if rank == call.root:
            _assign(call.outputs[0], call.inputs[rank])
        else:
            _clear(call.outputs[0])
    elif call.kind is Kind.ALL_TO_ALL:
        for index, output in enumerate(call.outputs):
            own, other = call.inputs[rank], call.inputs[index]
            _assign(output, own if own.numel() == output.numel() else other)
    elif call.kind in (Kind.RECV, Kind.RECV_ANY):
        _receive_nothing(call.outputs[0])


def _receive_nothing(output: torch.Tensor) -> None:
    """A lone integer is a vote, a flag or a count: 1 lets things go on (torch's pipelines vote on
    how stages learn of shapes, and with 0 wait for pickled ones that nobody sends)."""
    _clear(output)
    if output.numel() == 1 and output.dtype in (torch.int32, torch.int64):
        _assign(output, torch.ones((), dtype=output.dtype))


def completed(result: Any) -> torch.futures.Future[Any]:
    """A future that is complete."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future
