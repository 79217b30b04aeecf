"""Bodies of the collective tests; each runs on every rank of a fleet."""

from __future__ import annotations

import datetime
import random
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    ReduceOptions,
    _make_nccl_premul_sum,
)

from .fleet import Rank

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 7, 1000, 16_385, 300_001)


def make(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def expect_sum(values: list[torch.Tensor]) -> torch.Tensor:
    """The documented tree, by hand: fold, then halve the distance."""
    values = [value.clone() for value in values]
    core = 1 << (len(values).bit_length() - 1)
    for rank in range(core, len(values)):
        values[rank - core] = values[rank - core] + values[rank]
    distance = core // 2
    while distance:
        for rank in range(distance):
            values[rank] = values[rank] + values[rank + distance]
        distance //= 2
    return values[0]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def reductions(rank: Rank) -> None:
    rank.init()
    n, r = rank.size, rank.index
    for dtype in (*FLOATS, *INTS, torch.complex64, torch.complex128):
        for numel in SIZES:
            inputs = [make(dtype, numel, seed) for seed in range(n)]
            mine = inputs[r].clone()
            dist.all_reduce(mine)
            assert same(mine, expect_sum(inputs)), (dtype, numel)
            root = numel % n
            mine = inputs[r].clone()
            dist.reduce(mine, root)
            assert same(mine, expect_sum(inputs) if r == root else inputs[r]), (dtype, numel)
            flats = [make(dtype, numel * n, 100 + seed) for seed in range(n)]
            out, source = torch.empty(numel, dtype=dtype), flats[r].clone()
            dist.reduce_scatter_single(out, source)
            block = slice(r * numel, (r + 1) * numel)
            assert same(out, expect_sum([flat[block] for flat in flats])), (dtype, numel)
            assert same(source, flats[r])
            if dtype in FLOATS:
                mine = inputs[r].clone()
                dist.all_reduce(mine, dist.ReduceOp.AVG)
                assert same(mine, expect_sum(inputs).div_(n))
    for op, fn in ((dist.ReduceOp.MIN, torch.minimum), (dist.ReduceOp.MAX, torch.maximum)):
        for dtype in (*FLOATS, *INTS, torch.bool):
            inputs = [make(dtype, 5000, seed) for seed in range(n)]
            mine, expected = inputs[r].clone(), inputs[0].clone()
            for other in inputs[1:]:
                expected = fn(expected, other)
            dist.all_reduce(mine, op)
            assert same(mine, expected)
    ints = [make(torch.int64, 9000, seed) for seed in range(n)]
    for op, fn in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
        (dist.ReduceOp.PRODUCT, torch.mul),
    ):
        mine, expected = ints[r].clone(), ints[0].clone()
        for other in ints[1:]:
            expected = fn(expected, other)
        dist.all_reduce(mine, op)
        assert same(mine, expected), op
    mine = torch.full((20_000,), 3.0)
    options = AllreduceOptions()
    options.reduceOp = _make_nccl_premul_sum(0.5)
    dist.group.WORLD.allreduce([mine], options).wait()
    assert (mine == 1.5 * n).all()


def cut_invariance(rank: Rank) -> None:
    """A sum does not depend on how a tensor is cut, laid out or grouped."""
    rank.init()
    generator = random.Random(7)
    whole = torch.randn(200_003, generator=torch.Generator().manual_seed(rank.index)) * 1e3
    expected = whole.clone()
    dist.all_reduce(expected)
    for _ in range(6):
        pieces, at = [], 0
        while at < len(whole):
            size = generator.choice((1, 100, 5000, 8191, 8193, 60_000, 100_000))
            pieces.append(whole[at : at + size].clone())
            at += size
        works = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for work in works:
            work.wait()
        assert same(torch.cat(pieces), expected)
    n = rank.size
    padded = torch.cat([whole, torch.zeros(-len(whole) % n)])
    out = torch.empty(len(padded) // n)
    dist.reduce_scatter_single(out, padded)
    low = rank.index * len(out)
    assert same(out[: len(whole) - low], expected[low : low + len(out)])


def movement(rank: Rank) -> None:
    rank.init()
    n, r = rank.size, rank.index
    dtypes = (*FLOATS, *INTS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint32)
    for dtype in dtypes:
        for numel in (0, 1, 1000, 70_001):
            raw = [make(torch.uint8, numel * dtype.itemsize, seed) for seed in range(n)]
            source = [
                part.view(dtype) if dtype is not torch.bool else part % 2 == 0 for part in raw
            ]
            outs = [torch.empty(numel, dtype=dtype) for _ in range(n)]
            dist.all_gather(outs, source[r])
            assert all(same(a, b) for a, b in zip(outs, source, strict=True)), (dtype, numel)
            flat = torch.empty(numel * n, dtype=dtype)
            dist.all_gather_single(flat, source[r])
            assert same(flat, torch.cat([bits(s) for s in source]).view(dtype)) or numel == 0
            root = numel % n
            mine = source[r].clone()
            dist.broadcast(mine, root)
            assert same(mine, source[root])
            got = [torch.empty(numel, dtype=dtype) for _ in range(n)] if r == root else None
            dist.gather(source[r], got, root)
            if got is not None:
                assert all(same(a, b) for a, b in zip(got, source, strict=True))
            mine = torch.empty(numel, dtype=dtype)
            dist.scatter(mine, [s.clone() for s in source] if r == root else None, root)
            assert same(mine, source[r])
            sent = [source[(r + i) % n].clone() for i in range(n)]
            outs = [torch.empty(numel, dtype=dtype) for _ in range(n)]
            dist.all_to_all(outs, sent)
            assert all(same(outs[i], source[(i + r) % n]) for i in range(n))


def shapes(rank: Rank) -> None:
    """Strides, scalars, autograd, inference mode, in-place gathers, uneven splits, objects."""
    rank.init()
    n, r = rank.size, rank.index
    strided = torch.full((300, 40), float(r)).t()
    dist.all_reduce(strided)
    assert (strided == sum(range(n))).all()
    column = torch.zeros(500, 3)
    column[:, 1] = r
    dist.all_reduce(column[:, 1])
    assert (column[:, 1] == sum(range(n))).all() and (column[:, 0] == 0).all()
    scalar = torch.tensor(1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == n
    leaf = torch.ones(4, requires_grad=True)
    version = leaf._version
    dist.all_reduce(leaf.data)
    dist.broadcast(leaf.detach(), 0)
    assert leaf._version == version
    with torch.inference_mode():
        inferred = torch.ones(30_000)
        dist.all_reduce(inferred)
        assert (inferred == n).all()
        striped = torch.ones(100, 2)[:, 0]
        dist.all_reduce(striped)
        assert (striped == n).all()
    flat = torch.zeros(n * 10)
    flat[r * 10 : r * 10 + 10] = r + 1
    dist.all_gather_single(flat, flat[r * 10 : r * 10 + 10])
    assert flat[::10].tolist() == [float(i + 1) for i in range(n)]
    columns = torch.zeros(10, 2 * n)[:, ::2]
    dist.all_gather_single(columns.t(), torch.full((1, 10), float(r)))
    assert columns[0].tolist() == [float(i) for i in range(n)]
    uneven = [torch.empty(i + 1) for i in range(n)]
    dist.all_gather(uneven, torch.full((r + 1,), float(r)))
    assert all((t == i).all() for i, t in enumerate(uneven))
    inputs = [i + 1 for i in range(n)]
    out = torch.empty(n * (r + 1))
    dist.all_to_all_single(out, torch.full((sum(inputs),), float(r)), [r + 1] * n, inputs)
    assert out.tolist() == [float(i) for i in range(n) for _ in range(r + 1)]
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": r})
    assert objects == [{"rank": i} for i in range(n)]
    box = [{"root": r} if r == n - 1 else None]
    dist.broadcast_object_list(box, n - 1)
    assert box == [{"root": n - 1}]
    works = [torch.ones(1000) * i for i in range(3)]
    with dist._coalescing_manager():
        for tensor in works:
            dist.all_reduce(tensor)
    assert [t[0].item() for t in works] == [0.0, n, 2.0 * n]
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=33), dist.group.WORLD)
    dist.barrier()


def point_to_point(rank: Rank) -> None:
    rank.init()
    n, r = rank.size, rank.index
    big = torch.full((2_000_000,), float(r))
    got = torch.empty(2_000_000)
    works = [dist.isend(big, (r + 1) % n), dist.irecv(got, (r - 1) % n)]
    for work in works:
        work.wait()
    assert (got == (r - 1) % n).all()
    if r == 0:  # tags in another order than sent
        for tag in (1, 2, 3):
            dist.send(torch.full((5,), float(tag)), 1, tag=tag)
        dist.send(torch.full((5,), 10.0), 1, tag=1)
    elif r == 1:
        for tag, value in ((3, 3), (1, 1), (2, 2), (1, 10)):
            here = torch.empty(5)
            dist.recv(here, 0, tag=tag)
            assert (here == value).all()
    if r == 0:
        seen = set()
        for _ in range(2 * (n - 1)):
            here = torch.empty(3)
            source = dist.recv(here, tag=9)
            assert (here == source).all()
            seen.add(source)
        assert seen == set(range(1, n))
    else:
        for _ in range(2):
            dist.send(torch.full((3,), float(r)), 0, tag=9)
    dist.barrier()


def sub_groups(rank: Rank) -> None:
    rank.init()
    n, r = rank.size, rank.index
    even = dist.new_group(list(range(0, n, 2)))
    odd = dist.new_group(list(range(1, n, 2)))
    mine, members = (even, range(0, n, 2)) if r % 2 == 0 else (odd, range(1, n, 2))
    value = torch.full((50_000,), float(r))
    world = torch.full((50_000,), 1.0)
    works = [
        dist.all_reduce(value, group=mine, async_op=True),
        dist.all_reduce(world, async_op=True),
    ]
    for work in works:
        work.wait()
    assert (value == sum(members)).all() and (world == n).all()
    last = list(members)[-1]
    value = torch.full((10,), float(r))
    dist.broadcast(value, last, group=mine)
    assert (value == last).all()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("a", "b"))
    for name, size in (("a", 2), ("b", n // 2)):
        one = torch.ones(3)
        dist.all_reduce(one, group=mesh.get_group(name))
        assert (one == size).all()


def against_gloo(rank: Rank) -> None:
    """Integers exactly; floats within the bound of a reordered sum."""
    rank.init()
    n, r = rank.size, rank.index
    if r == 0:
        store = dist.TCPStore("127.0.0.1", 0, n, True, wait_for_workers=False)
        rank.board["store"] = store.port
    rank.sync("store")
    if r != 0:
        store = dist.TCPStore("127.0.0.1", rank.board["store"], n, False)
    gloo = dist.ProcessGroupGloo(store, r, n, datetime.timedelta(seconds=30))
    ours = dist.group.WORLD
    generator = random.Random(3)
    for _ in range(40):
        numel = generator.choice((1, 3, 1000, 8192, 8200, 123_457))
        dtype = generator.choice((torch.int32, torch.int64, torch.float32, torch.float64))
        op = generator.choice((dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        root = generator.randrange(n)
        source = make(dtype, numel, generator.randrange(10**6) + r)
        results = []
        for group in (gloo, ours):
            reduce_options, one = AllreduceOptions(), ReduceOptions()
            reduce_options.reduceOp = one.reduceOp = op
            one.rootRank = root
            spread = BroadcastOptions()
            spread.rootRank = root
            tensors = [source.clone() for _ in range(3)]
            group.allreduce([tensors[0]], reduce_options).wait()
            group.reduce([tensors[1]], one).wait()
            group.broadcast([tensors[2]], spread).wait()
            gathered = torch.empty(numel * n, dtype=dtype)
            group._allgather_base(gathered, source).wait()
            swapped = torch.empty(numel * n, dtype=dtype)
            group.alltoall_base(swapped, gathered, [], []).wait()
            results.append((*tensors, gathered, swapped))
        for index, (theirs, mine) in enumerate(zip(*results, strict=True)):
            if index == 1 and r != root:
                continue
            if dtype.is_floating_point and op == dist.ReduceOp.SUM and index < 2:
                bound = torch.finfo(dtype).eps * n * n * 8
                assert torch.allclose(theirs, mine, rtol=bound, atol=bound)
            else:
                assert same(theirs, mine), (index, numel, dtype, op)


def everything(rank: Rank) -> None:
    """All of the above in one fleet: starting processes is what costs time."""
    cases = [reductions, movement, shapes]
    if rank.size > 1:
        cases += [cut_invariance, point_to_point, against_gloo]
    if rank.size % 2 == 0 and rank.size > 2:
        cases.append(sub_groups)
    for case in cases:
        case(rank)
