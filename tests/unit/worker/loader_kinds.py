"""Every kind of loader whose position must be exact, and one way to read them all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainmover.state.rng import capture_rng, restore_rng
from trainmover.worker.batches import Batches

SAMPLES = 22
BATCH = 4


class Numbers(Dataset[torch.Tensor]):
    """Sample i is i; counts what was read."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor(index)


class Augmented(Numbers):
    """Adds noise from every global generator of the process it is read in."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return super().__getitem__(index) + noise


class EagerShuffle(Sampler[int]):
    """Draws its order in `__iter__`, not at the first index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.size).tolist())

    def __len__(self) -> int:
        return self.size


class LazyDraws(Sampler[int]):
    """Draws each index when it is asked for: no position can be restored."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()).item())

    def __len__(self) -> int:
        return SAMPLES


class PythonShuffle(Sampler[int]):
    """Shuffles with a generator of its own, of Python's kind."""

    def __init__(self) -> None:
        self.source = random.Random(3)

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.source.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset that knows where it is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < SAMPLES:
            self.place += 1
            yield torch.tensor(self.place)
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Forgetful(IterableDataset[torch.Tensor]):
    """An iterable dataset without state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(value) for value in range(SAMPLES)])


def seeded(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def replicas(**options: Any) -> DataLoader[Any]:
    data = Numbers(41)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=5)
    return DataLoader(data, batch_size=BATCH, sampler=sampler, **options)


WEIGHTS = [1.0 + index % 3 for index in range(SAMPLES)]
Loaders = dict[str, Callable[[], Any]]


def plain_kinds(**options: Any) -> Loaders:
    """Map-style loaders; `options` choose worker processes."""

    def loader(**more: Any) -> Callable[[], Any]:
        return lambda: DataLoader(Numbers(), batch_size=BATCH, **more, **options)

    def sampled(make: Callable[[], Sampler[int]]) -> Callable[[], Any]:
        return lambda: DataLoader(Numbers(), batch_size=BATCH, sampler=make(), **options)

    return {
        "sequential": loader(),
        "shuffle": loader(shuffle=True),
        "drop_last": loader(shuffle=True, drop_last=True),
        "own_generator": lambda: DataLoader(
            Numbers(), batch_size=BATCH, shuffle=True, generator=seeded(3), **options
        ),
        "sampler_generator": sampled(lambda: RandomSampler(Numbers(), generator=seeded(4))),
        "replacement": sampled(
            lambda: RandomSampler(Numbers(), replacement=True, num_samples=70, generator=seeded(4))
        ),
        "replacement_global": sampled(lambda: RandomSampler(Numbers(), replacement=True)),
        "subset": sampled(lambda: SubsetRandomSampler(range(3, 20))),
        "weighted": sampled(lambda: WeightedRandomSampler(WEIGHTS, SAMPLES)),
        "eager": sampled(lambda: EagerShuffle(SAMPLES)),
        "python_shuffle": sampled(PythonShuffle),
        "distributed": lambda: replicas(**options),
        "batch_sampler": lambda: DataLoader(
            Numbers(),
            batch_sampler=BatchSampler(RandomSampler(Numbers()), BATCH, drop_last=False),
            **options,
        ),
        "no_batching": lambda: DataLoader(
            Numbers(), batch_size=None, sampler=RandomSampler(Numbers()), **options
        ),
    }


def single_process_kinds() -> Loaders:
    """Loaders that read in the training process."""
    return {
        **plain_kinds(),
        "augmented": lambda: DataLoader(Augmented(), batch_size=BATCH, shuffle=True),
        "stream_with_state": lambda: DataLoader(Stream(), batch_size=BATCH),
        **stateful_kinds(),
    }


def stateful_kinds(**options: Any) -> Loaders:
    """torchdata's loaders."""
    return {
        "stateful_shuffle": lambda: StatefulDataLoader(
            Numbers(), batch_size=BATCH, shuffle=True, **options
        ),
        "stateful_generator": lambda: StatefulDataLoader(
            Numbers(), batch_size=BATCH, shuffle=True, generator=seeded(6), **options
        ),
        "stateful_stock_sampler": lambda: StatefulDataLoader(
            Numbers(), batch_size=BATCH, sampler=RandomSampler(Numbers()), **options
        ),
        "stateful_stock_generator": lambda: StatefulDataLoader(
            Numbers(),
            batch_size=BATCH,
            sampler=RandomSampler(Numbers(), generator=seeded(2)),
            **options,
        ),
        "stateful_replacement": lambda: StatefulDataLoader(
            Numbers(),
            batch_size=BATCH,
            sampler=RandomSampler(Numbers(), True, num_samples=50, generator=seeded(2)),
            **options,
        ),
        "stateful_no_batching": lambda: StatefulDataLoader(
            Numbers(), batch_size=None, shuffle=True, **options
        ),
        "stateful_foreign_batch_sampler": lambda: StatefulDataLoader(
            Numbers(),
            batch_sampler=BatchSampler(RandomSampler(Numbers()), BATCH, False),
            **options,
        ),
        "stateful_foreign_generator": lambda: StatefulDataLoader(
            Numbers(),
            batch_sampler=BatchSampler(RandomSampler(Numbers(), generator=seeded(8)), BATCH, False),
            generator=seeded(9),
            **options,
        ),
        "stateful_distributed": lambda: StatefulDataLoader(
            Numbers(), batch_size=BATCH, sampler=replicas().sampler, **options
        ),
        "stateful_stream": lambda: StatefulDataLoader(Stream(), batch_size=BATCH, **options),
    }


def get_batch() -> torch.Tensor:
    """A callable source, on the global generator."""
    return torch.randint(1000, (3,))


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def built(make: Callable[[], Any], seed: int = 11, **options: Any) -> Batches:
    """A loader as `main` builds it, the same on every machine."""
    seed_all(seed)
    return Batches(make(), **options)


def step(batches: Batches, reads: int = 1) -> tuple[Any, ...]:
    """One training step: reads batches and draws numbers as dropout would."""
    seen: list[Any] = []
    for _ in range(reads):
        seen.append(next(batches).tolist())
        seen.append(torch.rand(()).item())
        seen.append(random.random())
        seen.append(np.random.rand())
    return tuple(seen)


def undisturbed(make: Callable[[], Any], steps: int) -> list[tuple[Any, ...]]:
    """What a run without interruption sees, step by step."""
    batches = built(make)
    seed_all(12)
    seen = []
    for _ in range(steps):
        batches.begin_attempt()
        seen.append(step(batches))
    batches.close()
    return seen


def interrupted(make: Callable[[], Any], steps: int) -> list[tuple[Any, ...]]:
    """The same run with every step undone and repeated."""
    batches = built(make)
    seed_all(12)
    seen = []
    for _ in range(steps):
        batches.begin_attempt()
        boundary = capture_rng()
        step(batches)
        batches.rewind()
        restore_rng(boundary)
        seen.append(step(batches))
    batches.close()
    return seen


def moved(
    make: Callable[[], Any], steps: int, moves: set[int], early: int = 0
) -> list[tuple[Any, ...]]:
    """The same run, given to a new process's loader at each of the given steps; with `early` that
    goes first to where the run was so many steps before, as a joiner does."""
    batches = built(make)
    seed_all(12)
    seen = []
    hints = []
    for index in range(steps):
        hints.append(batches.position())
        if index in moves:
            boundary = capture_rng()
            position = batches.position()
            batches.close()
            batches = built(make)
            step(batches, reads=2)  # a standby's rehearsal
            restore_rng(boundary)
            if early:
                batches.restore(hints[max(index - early, 0)])
            batches.restore(position)
            assert capture_rng() == boundary
            assert batches.position() == position
        batches.begin_attempt()
        seen.append(step(batches))
    batches.close()
    return seen
