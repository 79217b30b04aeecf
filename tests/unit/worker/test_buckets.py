"""DDP's buckets start over: as in a new process, whatever the module has been through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmover.state.inventory import Inventory
from trainmover.worker.buckets import ddp_modules, renew

ITERATIONS = 4


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def made(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 600), nn.Linear(600, 1))
    return DistributedDataParallel(net, bucket_cap_mb=1, **options)


class Hook:
    """Notes the size of every bucket it is given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def note(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.sizes.append(bucket.buffer().numel())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def iterate(model: nn.Module, hook: Hook) -> tuple[list[int], list[torch.Tensor]]:
    """Sizes of the buckets of one iteration, and its gradients."""
    hook.sizes = []
    model.zero_grad(set_to_none=True)
    model(torch.ones(4, 8)).sum().backward()
    return hook.sizes, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [0, 1, 2, 4])
def test_the_next_iterations_are_those_of_a_new_process(
    options: dict[str, bool], before: int
) -> None:
    first, second = Hook(), Hook()
    new, old = made(**options), made(**options)
    new.register_comm_hook(None, lambda _, bucket: first.note(bucket))
    old.register_comm_hook(None, lambda _, bucket: second.note(bucket))
    for _ in range(before):
        iterate(old, second)
    renew(old)
    for _ in range(ITERATIONS):
        sizes, gradients = iterate(new, first)
        found, same = iterate(old, second)
        assert found == sizes and sizes
        assert all(map(torch.equal, gradients, same)) and len(same) == len(gradients)


def test_a_module_without_hooks_reduces_again() -> None:
    model = made()
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    renew(model)
    state: Any = model
    names = state.logger._get_ddp_logging_data().strs_map
    assert names["comm_hook"] == "BuiltinCommHookType.ALLREDUCE"
    _, gradients = iterate(model, Hook())
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_hooks_of_the_script_stay() -> None:
    model, hook = made(), Hook()
    seen: list[int] = []
    weight = model.module[0].weight
    weight.expand_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: seen.append(1))
    weight.register_hook(lambda _: seen.append(2))
    iterate(model, hook)
    renew(model)
    iterate(model, hook)
    assert sorted(seen) == [1, 1, 2, 2]


def test_a_module_around_a_tracked_one_is_found() -> None:
    inner, outer, other = made(), made(), made()
    assert ddp_modules(Inventory({"a": inner, "b": outer.module})) == (inner, outer)
    assert ddp_modules(Inventory({})) == ()
    assert other not in ddp_modules(Inventory({"a": inner}))
