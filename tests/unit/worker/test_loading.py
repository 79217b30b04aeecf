"""Every kind of state through a durable checkpoint and back: bit for bit, or refused by name."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import trainmover
from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.local_store import LocalStore
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import Checkpoint, open_checkpoint
from trainmover.checkpoint.shard_state import RankState
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import CheckpointError, StateMismatch, TrackError
from trainmover.protocol.carried import Version
from trainmover.protocol.snapshot_image import HEADER_BYTES
from trainmover.state.inventory import Inventory
from trainmover.state.rng import capture_rng
from trainmover.state.snapshot import ImageWriter, image_entries
from trainmover.worker.loading import (
    Loaded,
    buffer_dtypes,
    cast_buffers,
    load_other_size,
    load_same_size,
)
from trainmover.worker.personal import Personal, encode
from trainmover.worker.snapshots import SharedLeaves

Objects = dict[str, Any]


@dataclass
class Standing:
    """What loading asks of a stepper."""

    inventory: Inventory
    rank: int = 0
    world_size: int = 1


def saved(inventory: Inventory, path: Path, world_size: int = 1) -> Checkpoint:
    """The inventory as a committed checkpoint of so many equal ranks."""
    store = LocalStore(path)
    records = []
    for rank in range(world_size):
        entries, size = image_entries(inventory)
        memory = bytearray(HEADER_BYTES + size + 64)
        ImageWriter(memory).write(inventory, entries)
        smalls = tuple((name, inventory.small_bytes(name)) for name in inventory.small_names)
        shared = SharedLeaves(manifest=inventory.manifest(), smalls=smalls)
        personal = Personal(
            owner_rank=rank,
            version=Version(step=10, lineage=1),
            is_final=True,
            rng=capture_rng(),
            batches=(),
            step_index=10,
        )
        state = RankState(
            rank=rank,
            world_size=world_size,
            step=10,
            lineage=1,
            generation=1,
            identity=inventory.identity,
            entries=entries,
            personal=encode(personal),
            shared=msgspec.msgpack.encode(shared),
            bulk_digest=inventory.bulk_digest(),
            run_id="run",
        )
        image = memoryview(memory)[HEADER_BYTES : HEADER_BYTES + size]
        records.append(write_rank(store, state, image))
    committed = commit(store, records, Authority(term=1, generation=1))
    return open_checkpoint(store, committed.name)


def load(standing: Standing, checkpoint: Checkpoint, *, allows_cast: bool = False) -> Loaded:
    is_same = checkpoint.manifest.world_size == standing.world_size
    take = load_same_size if is_same else load_other_size
    return take(standing, checkpoint, allows_cast=allows_cast)  # type: ignore[arg-type]


# -- what can be saved -----------------------------------------------------------------------------


class Holder(nn.Module):
    """One parameter and whatever else is given."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value, requires_grad=value.is_floating_point()))


class Tied(nn.Module):
    """C73 (a), (c): the output shares the embedding; one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embedding.weight
        self.first = nn.Linear(4, 4)
        self.again = self.first

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """[B] int64 -> [B, 8]."""
        logits: torch.Tensor = self.out(self.again(self.first(self.embedding(words))))
        return logits


class Diverged(nn.Module):
    """C73 (b): meant to be tied, but two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.out = nn.Linear(4, 8, bias=False)


class Flat(nn.Module):
    """C73 (d): parameters are views of one flat buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = torch.randn(24)
        self.first = nn.Parameter(self.flat[:12].view(3, 4))
        self.second = nn.Parameter(self.flat[12:].view(4, 3))


class Counting:
    """Plain Python state of every kind."""

    def __init__(self, seed: int) -> None:
        self.state = {
            "int": seed,
            "big": 7**80 + seed,
            "float": float("inf"),
            "text": "é",
            "none": None,
            "tuple": (1, [2.5, {"k": {3, 4}}]),
            "ordered": OrderedDict(b=1, a=2),
            "counter": Counter("abca"),
            "deque": deque([1, 2], maxlen=3),
            "complex": 1 + 2j,
            "bytes": b"raw",
            "dtype": torch.bfloat16,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def module(make: Callable[[], nn.Module]) -> Callable[[int], Objects]:
    def objects(seed: int) -> Objects:
        torch.manual_seed(seed)
        return {"model": make()}

    return objects


def stepped(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[int], Objects]:
    def objects(seed: int) -> Objects:
        torch.manual_seed(seed)
        model = Tied()
        optimizer = kind(model.parameters(), **options)
        if seed == 1:  # the one that is saved; the other's optimizer has no state yet
            for _ in range(2):
                model(torch.arange(8)).square().sum().backward()
                optimizer.step()
        return {"model": model, "optimizer": optimizer}

    return objects


def sparse_adam(seed: int) -> Objects:
    torch.manual_seed(seed)
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    if seed == 1:
        model(torch.tensor([1, 5])).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


KINDS: dict[str, Callable[[int], Objects]] = {
    "tied": module(Tied),
    "diverged": module(Diverged),
    "flat": module(Flat),
    "scalar": module(lambda: Holder(a=torch.randn(()))),
    "empty": module(lambda: Holder(a=torch.randn(0, 3), b=torch.randn(2))),
    "bfloat16": module(lambda: Holder(a=torch.randn(3, 5).bfloat16())),
    "float16": module(lambda: Holder(a=torch.randn(3, 5).half())),
    "complex": module(lambda: Holder(a=torch.randn(3, dtype=torch.complex64))),
    "complex128": module(lambda: Holder(a=torch.randn(3, dtype=torch.complex128))),
    "float8": module(lambda: Holder(a=torch.randn(8).to(torch.float8_e4m3fn))),
    "integers": module(lambda: Holder(a=torch.randint(9, (3,)), b=torch.rand(3) > 0.5)),
    "turned": module(lambda: Holder(a=torch.randn(6, 4).t())),
    "batch_norm": module(lambda: nn.BatchNorm1d(3)),
    "adamw": stepped(torch.optim.AdamW),
    "sgd": stepped(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": stepped(torch.optim.Adafactor),
    "sparse_adam": sparse_adam,
    "plain": lambda seed: {"model": nn.Linear(1, 1), "counter": Counting(seed)},
    "value": lambda seed: {"model": nn.Linear(1, 1), "best": trainmover.Value(float(seed))},
    "generator": lambda seed: {
        "model": nn.Linear(1, 1),
        "noise": torch.Generator().manual_seed(seed),
    },
}


def everything(inventory: Inventory) -> Any:
    smalls = [(name, inventory.small_bytes(name)) for name in inventory.small_names]
    layout = [(name, tensor.stride(), tensor.dtype) for name, tensor in inventory.bulk()]
    return inventory.bulk_digests(), smalls, layout


@pytest.mark.parametrize("kind", KINDS)
def test_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    inventory = Inventory(KINDS[kind](1))
    checkpoint = saved(inventory, tmp_path)
    objects = KINDS[kind](2)
    here = Inventory(objects)
    load(Standing(here), checkpoint)
    assert everything(here) == everything(inventory)
    model = objects["model"]
    if kind == "tied":
        assert model.out.weight is model.embedding.weight
        assert model.again is model.first
        assert sum("weight" in entry.name for entry in checkpoint.manifest.layout) == 2
    if kind == "diverged":
        assert len({id(parameter) for parameter in model.parameters()}) == 2
    if kind == "flat":
        assert model.first.data_ptr() == model.flat.data_ptr()
        assert torch.equal(model.flat[12:].view(4, 3), model.second)


@pytest.mark.parametrize("kind", ["tied", "adamw", "bfloat16", "turned", "plain"])
def test_comes_back_at_another_world_size(kind: str, tmp_path: Path) -> None:
    inventory = Inventory(KINDS[kind](1))
    checkpoint = saved(inventory, tmp_path, world_size=2)
    here = Inventory(KINDS[kind](2))
    loaded = load(Standing(here, rank=2, world_size=3), checkpoint)
    assert everything(here) == everything(inventory)
    assert len(loaded.personals) == 2


REFUSED = {
    "sparse": (lambda: torch.randn(3).to_sparse(), "sparse"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta device"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_when_it_is_tracked(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(TrackError, match=f"model.a is .*{words}"):
        Inventory({"model": Holder(a=make())})


# -- casts -----------------------------------------------------------------------------------------


def in_dtype(dtype: torch.dtype, seed: int) -> Objects:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if seed == 1:
        model(torch.randn(4, 3, dtype=dtype)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("there", [torch.float32, torch.float16])
def test_a_cast_is_refused_unless_asked_for(there: torch.dtype, ranks: int, tmp_path: Path) -> None:
    """Also between dtypes of one size, at another world size, and in buffers."""
    objects = in_dtype(there, 1)
    checkpoint = saved(Inventory(objects), tmp_path, world_size=ranks)
    mine = in_dtype(torch.bfloat16, 2)
    here = Inventory(mine)
    name = str(there).removeprefix("torch.")
    words = f"model.0.weight is {name} there and bfloat16 here .*allows_cast"
    with pytest.raises(StateMismatch, match=words):
        load(Standing(here), checkpoint)
    dtypes = buffer_dtypes(here)
    loaded = load(Standing(here), checkpoint, allows_cast=True)
    cast_buffers(here, dtypes)
    assert any("momentum_buffer" in word for word in loaded.casts)
    for one, other in zip(
        [*objects["model"].state_dict().values()],
        [*mine["model"].state_dict().values()],
        strict=True,
    ):
        assert torch.equal(one.to(other.dtype), other)
        assert other.dtype in (torch.bfloat16, torch.int64)
    parameter = next(iter(mine["model"].parameters()))
    assert mine["optimizer"].state[parameter]["momentum_buffer"].dtype == torch.bfloat16


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = saved(Inventory({"model": nn.Linear(3, 2)}), tmp_path)
    with pytest.raises(StateMismatch, match=r"model.weight \[2, 3\]"):
        load(Standing(Inventory({"model": nn.Linear(4, 2)})), checkpoint, allows_cast=True)


# -- no unpickling ---------------------------------------------------------------------------------


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize(
    "target", ["MANIFEST.json", "rank-00000.msgpack", "rank-00000.safetensors"]
)
def test_a_pickle_in_a_checkpoint_is_refused_and_not_run(target: str, tmp_path: Path) -> None:
    inventory = Inventory(KINDS["adamw"](1))
    checkpoint = saved(inventory, tmp_path / "c")
    trace = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(trace))
    (tmp_path / "c" / checkpoint.name / target).write_bytes(bomb)
    with pytest.raises(CheckpointError):
        load(
            Standing(Inventory(KINDS["adamw"](2))),
            open_checkpoint(LocalStore(tmp_path / "c"), checkpoint.name),
        )
    assert not trace.exists()
    pickle.loads(bomb)
    assert trace.exists(), "the bomb works"


@pytest.mark.parametrize("field", ["personal", "shared"])
def test_a_pickle_within_valid_files_is_refused_and_not_run(field: str, tmp_path: Path) -> None:
    """Checksums agree: somebody who can write checkpoints has made it."""
    inventory = Inventory(KINDS["adamw"](1))
    trace = tmp_path / "exploded"
    entries, size = image_entries(inventory)
    memory = bytearray(HEADER_BYTES + size + 64)
    ImageWriter(memory).write(inventory, entries)
    parts = {
        "personal": encode(
            Personal(
                owner_rank=0,
                version=Version(step=10, lineage=1),
                is_final=True,
                rng=b"",
                batches=(),
            )
        ),
        "shared": msgspec.msgpack.encode(SharedLeaves(manifest=inventory.manifest(), smalls=())),
        field: pickle.dumps(Bomb(trace)),
    }
    state = RankState(
        rank=0,
        world_size=1,
        step=10,
        lineage=1,
        generation=1,
        identity=inventory.identity,
        entries=entries,
        bulk_digest=inventory.bulk_digest(),
        run_id="run",
        **parts,
    )
    store = LocalStore(tmp_path / "c")
    record = write_rank(store, state, memoryview(memory)[HEADER_BYTES : HEADER_BYTES + size])
    name = commit(store, [record], Authority(term=1, generation=1)).name
    with pytest.raises(trainmover.errors.TrainMoverError):
        load(Standing(Inventory(KINDS["adamw"](2))), open_checkpoint(store, name))
    assert not trace.exists()
