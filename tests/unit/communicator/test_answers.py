"""Local answers are valid values, never fresh memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from trainmover.communicator import answers
from trainmover.communicator.call import Call, GroupPlace, Kind, describe_check
from trainmover.communicator.reductions import reduction

PLACE = GroupPlace("g", 1, (0, 1, 2), 1, 60.0)
NAN = math.nan


def call(
    kind: Kind, inputs: list[torch.Tensor], outputs: list[torch.Tensor], op: object = None
) -> Call:
    made = Call(kind, PLACE, inputs, outputs, None)
    made.reduction = None if op is None else reduction(op)
    made.seal(1)
    return made


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 6.0),
        (dist.ReduceOp.AVG, 2.0),
        (dist.ReduceOp.MIN, 2.0),
        (dist.ReduceOp.MAX, 2.0),
        (dist.ReduceOp.PRODUCT, 8.0),
    ],
)
def test_loop_back_is_as_if_all_had_sent_the_same(op: object, expected: float) -> None:
    value = torch.full((2, 3), 2.0)
    answers.loop_back(call(Kind.ALL_REDUCE, [], [value], op))
    assert (value == expected).all()
    strided = torch.full((4, 6), 2.0)[:, ::2]
    answers.loop_back(call(Kind.ALL_REDUCE, [], [strided], op))
    assert (strided == expected).all()


def test_loop_back_reduce_scatter_takes_the_own_block() -> None:
    out, blocks = torch.full((2,), NAN), [torch.full((2,), float(i)) for i in range(3)]
    answers.loop_back(call(Kind.REDUCE_SCATTER, blocks, [out], dist.ReduceOp.SUM))
    assert out.tolist() == [3.0, 3.0] and blocks[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("fn", [answers.loop_back, lambda c: answers.run_out(c, False)])
def test_movement_never_shows_fresh_memory(fn: object) -> None:
    assert callable(fn)
    outs = [torch.full((2,), NAN) for _ in range(3)]
    fn(call(Kind.ALL_GATHER, [torch.ones(2)], outs))
    assert all(o.tolist() == [1.0, 1.0] for o in outs)
    received = torch.full((2,), NAN)
    fn(call(Kind.RECV, [], [received]))
    assert received.tolist() == [0.0, 0.0]
    fresh = call(Kind.BROADCAST, [], [torch.full((2,), NAN)])
    fresh.is_initialised = False
    fn(fresh)
    assert fresh.outputs[0].tolist() == [0.0, 0.0]
    written = call(Kind.BROADCAST, [], [torch.full((2,), 4.0)])
    fn(written)
    assert written.outputs[0].tolist() == [4.0, 4.0]


def test_run_out_keeps_own_input_and_clears_torn_results() -> None:
    kept, torn = torch.full((2,), 5.0), torch.full((2,), 5.0)
    answers.run_out(call(Kind.ALL_REDUCE, [], [kept], dist.ReduceOp.SUM), False)
    answers.run_out(call(Kind.ALL_REDUCE, [], [torn], dist.ReduceOp.SUM), True)
    assert kept.tolist() == [5.0, 5.0] and torn.tolist() == [0.0, 0.0]


def test_checks_describe_a_call() -> None:
    made = call(Kind.ALL_REDUCE, [], [torch.ones(1, dtype=torch.bfloat16)], dist.ReduceOp.SUM)
    assert describe_check(made.check) == "all_reduce SUM of 1 elements of torch.bfloat16"
