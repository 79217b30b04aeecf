"""Which samplers follow a change of rank, and which read what the script gave them."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainmover.worker.batches import Batches

DATA = TensorDataset(torch.arange(64))


def sampler_of(count: int, rank: int) -> tuple[Batches, DistributedSampler[object]]:
    sampler: DistributedSampler[object] = DistributedSampler(DATA, num_replicas=count, rank=rank)
    return Batches(DataLoader(DATA, batch_size=2, sampler=sampler)), sampler


def test_a_sampler_of_all_ranks_follows() -> None:
    batches, sampler = sampler_of(4, 0)
    assert batches.set_rank(3, 0, 4)
    assert sampler.rank == 3


def test_a_sampler_of_fewer_parts_than_ranks_is_left_alone() -> None:
    """Ranks 2 and 3 hold parts of the model that reads share 1 of 2; 3 is no share at all."""
    batches, sampler = sampler_of(2, 0)
    assert not batches.set_rank(3, 0, 4), "main must be entered again as rank 3"
    assert sampler.rank == 0


def test_a_sampler_that_the_script_numbered_is_left_alone() -> None:
    batches, sampler = sampler_of(4, 2)
    assert not batches.set_rank(3, 0, 4)
    assert sampler.rank == 2
    assert batches.set_rank(3, 2, 4)


def test_adopting_the_same_rank_twice_changes_nothing() -> None:
    batches, sampler = sampler_of(4, 3)
    assert batches.set_rank(3, 0, 4)
    assert sampler.rank == 3
