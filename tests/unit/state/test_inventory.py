"""What is tracked, under which names, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.state.toy import Run, Toy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from trainmover.errors import StateMismatch, TrackError
from trainmover.state import inventory
from trainmover.state.codec import decode_plain
from trainmover.state.inventory import Inventory
from trainmover.state.value import Value


@pytest.fixture
def as_rank() -> Iterator[Any]:
    """Play a rank of a world whose collectives do nothing."""

    def become(rank: int, world: int = 4) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def large_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer counts as too large to be compared at each gate."""
    monkeypatch.setattr(inventory, "SMALL_BUFFERS_BYTES", 0)


def test_names_and_order() -> None:
    run = Run()
    names = [name for name, _ in run.inventory.bulk()]
    assert names == [
        "model.embedding.weight",
        "model.hidden.weight",
        "model.hidden.bias",
        "model.norm.weight",
        "model.norm.bias",
    ]
    assert run.inventory.small_names == (
        "optimizer.param_groups",
        "scheduler",
        "scaler",
        "average",
        "best",
        "module buffers",
    )
    run.step()
    assert len(run.inventory.bulk()) == len(names) + 3 * 5
    assert "optimizer.state[model.embedding.weight].step" in run.inventory.bulk_digests()


def test_large_buffers_travel_as_bulk(large_buffers: None) -> None:
    run = Run()
    names = [name for name, _ in run.inventory.bulk()]
    assert names[5:] == [
        "model.table",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    ]
    assert "module buffers" in run.inventory.small_names, "equal on all ranks, whatever they hold"
    assert decode_plain(run.inventory.small_bytes("module buffers")) == {}


def test_tied_weights_and_nested_modules_appear_once() -> None:
    model = Toy()
    inner = Inventory({"whole": model, "part": model.hidden, "again": model})
    assert sum("weight" in name for name, _ in inner.bulk()) == 3
    assert len(inner.models) == 2
    alias = nn.Linear(2, 2, bias=False)
    other = nn.Linear(2, 2, bias=False)
    other.weight.data = alias.weight.data
    assert len(Inventory({"a": alias, "b": other}).bulk()) == 1


def test_wrappers_leave_no_trace_in_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    expected = [name for name, _ in Inventory({"m": model}).bulk()]
    compiled = torch.compile(model, backend="eager")
    assert [name for name, _ in Inventory({"m": compiled}).bulk()] == expected
    blocks = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))  # type: ignore[arg-type]
    assert [name for name, _ in Inventory({"m": blocks}).bulk()] == expected


def test_identity_is_that_of_replicas() -> None:
    one, two = Run(seed=1), Run(seed=2)
    one.step()
    assert one.inventory.identity == two.inventory.identity
    assert one.inventory.names_digest == two.inventory.names_digest
    assert len(one.inventory.identity) == 16
    int(one.inventory.identity, 16)
    wide = nn.Linear(3, 2)
    assert Inventory({"m": wide}).identity != Inventory({"m": nn.Linear(2, 3)}).identity
    assert Inventory({"m": wide}).identity != Inventory({"n": wide}).identity
    half = copy.deepcopy(wide).to(torch.bfloat16)
    assert Inventory({"m": wide}).identity != Inventory({"m": half}).identity


def sharded(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters())


def test_shards_of_different_places_are_not_replicas(as_rank: Any) -> None:
    identities = []
    for rank in range(4):
        as_rank(rank)
        model, optimizer = sharded(init_device_mesh("cpu", (4,)))
        inventory = Inventory({"model": model, "optimizer": optimizer})
        identities.append(inventory.identity)
        name, weight = inventory.bulk()[0]
        assert name == "model.0.weight"
        assert tuple(weight.shape) == (2, 8)
        assert inventory.manifest().entries[0].global_offset == (2 * rank, 0)
    assert len(set(identities)) == 4


def test_hybrid_sharding_has_replicas(as_rank: Any) -> None:
    identities = []
    for rank in range(4):
        as_rank(rank)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, optimizer = sharded(mesh)
        identities.append(Inventory({"model": model, "optimizer": optimizer}).identity)
    assert identities[0] == identities[2]
    assert identities[1] == identities[3]
    assert identities[0] != identities[1]


def test_a_sharded_joiner_conforms(as_rank: Any) -> None:
    as_rank(1)
    mesh = init_device_mesh("cpu", (4,))
    model, optimizer = sharded(mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    inventory = Inventory({"model": model, "optimizer": optimizer})
    joiner_model, joiner_optimizer = sharded(mesh)
    joiner = Inventory({"model": joiner_model, "optimizer": joiner_optimizer})
    joiner.conform(inventory.manifest())
    assert joiner.manifest() == inventory.manifest()
    for (_, here), (_, there) in zip(joiner.bulk(), inventory.bulk(), strict=True):
        here.detach().copy_(there)
    assert joiner.bulk_digest() == inventory.bulk_digest()
    for one, other in ((model, optimizer), (joiner_model, joiner_optimizer)):
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
        other.step()
    assert joiner.bulk_digest() == inventory.bulk_digest()


def test_a_joiner_without_optimizer_state_conforms() -> None:
    source, joiner = Run(), Run(seed=5)
    source.step()
    joiner.inventory.conform(source.inventory.manifest())
    assert joiner.inventory.manifest() == source.inventory.manifest()


def test_a_joiner_with_too_much_state_conforms() -> None:
    source, joiner = Run(), Run(seed=5)
    joiner.step()
    joiner.inventory.conform(source.inventory.manifest())
    assert joiner.inventory.manifest() == source.inventory.manifest()
    assert not joiner.optimizer.state


def test_conform_names_the_first_difference() -> None:
    source = Inventory({"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))})
    joiner = Inventory({"m": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4))})
    with pytest.raises(StateMismatch, match=r"m.1.weight \[3, 2\] float32.*\[4, 2\]"):
        joiner.conform(source.manifest())
    with pytest.raises(StateMismatch, match="tracked objects differ: best .*nothing here"):
        Inventory({}).conform(Inventory({"best": Value(1)}).manifest())


def test_buffers_that_come_and_go() -> None:
    source, joiner = nn.Module(), nn.Module()
    for module in (source, joiner):
        module.register_buffer("cache", None)
        module.register_buffer("grows", torch.ones(2))
    there, here = Inventory({"m": source}), Inventory({"m": joiner})
    source.cache, source.grows = torch.ones(3), torch.ones(5)
    here.conform(there.manifest())
    assert here.manifest() == there.manifest()
    source.cache = None
    here.conform(there.manifest())
    assert joiner.cache is None


class Container(torch.optim.Optimizer):
    """Several optimizers behind one, as trainers with several model parts have."""

    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        self.optimizers = inner
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {})


def test_optimizer_containers_are_opened() -> None:
    parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    inner: list[Any] = [torch.optim.SGD(part.parameters(), 0.1) for part in parts]
    inventory = Inventory({"parts": parts, "optimizers": Container(inner)})
    assert inventory.optimizers == inner
    assert inventory.small_names == (
        "optimizers.0.param_groups",
        "optimizers.1.param_groups",
        "module buffers",
    )


def test_parameters_outside_of_modules_are_entries() -> None:
    loose = nn.Parameter(torch.ones(3))
    inventory = Inventory({"optimizer": torch.optim.SGD([loose], 0.1)})
    assert [name for name, _ in inventory.bulk()] == ["optimizer.params[0][0]"]


def test_tensors_and_generators_can_be_tracked() -> None:
    generator = torch.Generator()
    generator.manual_seed(4)
    inventory = Inventory({"t": torch.ones(2), "g": generator})
    assert [name for name, _ in inventory.bulk()] == ["t"]
    data = inventory.small_bytes("g")
    first = torch.rand(2, generator=generator)
    inventory.load_small("g", data)
    assert torch.equal(torch.rand(2, generator=generator), first)


class Extra(nn.Module):
    """A module with state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_extra_state_of_modules() -> None:
    model = nn.Sequential(Extra())
    inventory = Inventory({"model": model})
    assert inventory.small_names == ("model.0.extra_state", "module buffers")
    data = inventory.small_bytes("model.0.extra_state")
    model[0].scale = 9.0
    inventory.load_small("model.0.extra_state", data)
    assert model[0].scale == 1.0


def test_non_contiguous_and_odd_tensors_have_digests(large_buffers: None) -> None:
    model = nn.Module()
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    model.register_buffer("empty", torch.empty(0, 3))
    model.register_buffer("bf16", torch.ones((), dtype=torch.bfloat16))
    model.register_buffer("complex64", torch.tensor([1 + 2j]).conj())
    digests = Inventory({"m": model}).bulk_digests()
    straight = nn.Module()
    straight.register_buffer("turned", model.turned.contiguous())
    assert Inventory({"m": straight}).bulk_digests()["m.turned"] == digests["m.turned"]
    assert all(0 <= digest < 1 << 63 for digest in digests.values())


def test_one_bit_changes_the_digest_of_its_entry_only() -> None:
    run = Run()
    before, total = run.inventory.bulk_digests(), run.inventory.bulk_digest()
    run.model.hidden.bias.data.view(torch.int32)[3] ^= 1
    after = run.inventory.bulk_digests()
    assert [n for n in before if before[n] != after[n]] == ["model.hidden.bias"]
    assert run.inventory.bulk_digest() != total


class Unplain:
    """State that is not plain data."""

    def state_dict(self) -> dict[str, Any]:
        return {"callbacks": [len]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (
            {"model": nn.Linear(2, 2, device="meta")},
            r"model.weight is on the meta device; call track\(\) after initialisation",
        ),
        ({"model": nn.LazyLinear(2)}, "not initialised yet"),
        ({"loader": DataLoader([1])}, r"batches = job.batches\(loader\)"),
        ({"thing": object()}, r"track\(thing=...\) got a object, which has no state_dict\(\)"),
        ({"count": 3}, r"track\(count=trainmover.Value"),
        ({"odd": Unplain()}, r"odd\['callbacks'\]\[0\] is a builtins"),
    ],
)
def test_what_is_refused(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(TrackError, match=message):
        Inventory(objects)


def test_a_parameter_group_added_later_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    inventory = Inventory({"model": model, "optimizer": optimizer})
    late = nn.Parameter(torch.ones(7))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(7)
    optimizer.step()
    with pytest.raises(TrackError, match=r"parameter of shape \(7,\) after track"):
        inventory.bulk()
