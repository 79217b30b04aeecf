"""An epoch dealt out anew at another world size: each sample once, whatever was read before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.worker.loader_kinds import Forgetful, Numbers, Stream, built, get_batch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainmover.errors import ScriptError, StateMismatch
from trainmover.worker.batches import Batches
from trainmover.worker.loader_place import names_digest

EVEN = 720
"""Samples; no number of ranks below has to fill parts up."""
UNEVEN = 101


def loader(
    rank: int, ranks: int, size: int = EVEN, kind: type[Any] = DataLoader, **options: Any
) -> Any:
    data = Numbers(size)
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=True, seed=5)
    return kind(data, batch_size=options.pop("batch_size", 4), sampler=sampler, **options)


def fleet(ranks: int, size: int = EVEN, **options: Any) -> list[Batches]:
    """One loader of each rank, as `main` builds them."""
    return [built(lambda r=rank: loader(r, ranks, size, **options)) for rank in range(ranks)]


def read(fleet: list[Batches], steps: int) -> list[int]:
    return [index for _ in range(steps) for one in fleet for index in next(one).tolist()]


def restarted(before: list[Batches], after: list[Batches]) -> list[Batches]:
    positions = [one.position() for one in before]
    for rank, one in enumerate(after):
        one.share_out(positions, rank, len(after))
    return after


def read_epoch(ranks: list[Batches]) -> list[int]:
    """What is left of the epoch of now."""
    epoch, seen = ranks[0].epoch, []
    while True:
        positions = [one.position() for one in ranks]
        got = [next(one).tolist() for one in ranks]
        if ranks[0].epoch != epoch:
            for one, position in zip(ranks, positions, strict=True):
                one.restore(position)
            return seen
        assert len({one.epoch for one in ranks}) == 1
        seen += [index for batch in got for index in batch]


STATEFUL = {"kind": StatefulDataLoader}


@pytest.mark.parametrize("options", [{}, STATEFUL], ids=["plain", "stateful"])
@pytest.mark.parametrize("sizes", [(2, 3, 4, 1, 2), (4, 2), (1, 3), (3, 6, 4)], ids=str)
def test_each_sample_once(sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Several world sizes in one epoch; the next epoch is whole again."""
    ranks = fleet(sizes[0], **options)
    seen = read(ranks, 6)
    for size in sizes[1:]:
        ranks = restarted(ranks, fleet(size, **options))
        seen += read(ranks, 5)
    seen += read_epoch(ranks)
    assert sorted(seen) == list(range(EVEN))
    following = read(ranks, len(ranks[0]))
    assert sorted(following) == list(range(EVEN))
    assert ranks[0].epoch == 1
    assert following == read_whole(sizes[-1], epoch=1, **options)


def read_whole(size: int, epoch: int, samples: int = EVEN, **options: Any) -> list[int]:
    ranks = fleet(size, samples, **options)
    read(ranks, len(ranks[0]) * epoch)
    return read(ranks, len(ranks[0]))


@pytest.mark.parametrize("options", [{}, STATEFUL], ids=["plain", "stateful"])
def test_order_and_place_are_kept_at_the_same_size(options: dict[str, Any]) -> None:
    """Dealing out anew to as many is going on as before."""
    first = fleet(3, **options)
    read(first, 4)
    assert read(restarted(first, fleet(3, **options)), 6) == read(first, 6)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, STATEFUL], ids=["plain", "stateful"])
def test_resumed_within_what_was_left(options: dict[str, Any], workers: int) -> None:
    """At the same size again, at every place of the rest and behind it."""
    wanted = {**options, "num_workers": workers}
    if workers:
        wanted["persistent_workers"] = True
    ranks = fleet(2, 96, **options)
    read(ranks, 5)
    positions = [one.position() for one in ranks]

    def rank_of(position: bytes | None) -> Batches:
        one = built(lambda: loader(1, 3, 96, **wanted))
        if position is None:
            one.share_out(positions, 1, 3)
        else:
            one.restore(position)
        return one

    undisturbed = rank_of(None)
    expected = [next(undisturbed).tolist() for _ in range(13)]
    undisturbed.close()
    assert undisturbed.epoch == 1
    for place in range(0, 13, 1 if workers == 0 else 5):
        one = rank_of(None)
        seen = [next(one).tolist() for _ in range(place)]
        position = one.position()
        one.close()
        again = rank_of(position)
        seen += [next(again).tolist() for _ in range(13 - place)]
        again.close()
        assert seen == expected, place


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (4, 3, 5)], ids=str)
def test_parts_that_are_filled_up_repeat_no_more_than_that(sizes: tuple[int, ...]) -> None:
    """torch fills parts up by repeating samples; nothing else is read twice, nothing left out."""
    ranks = fleet(sizes[0], UNEVEN)
    seen = read(ranks, 3)
    for size in sizes[1:]:
        ranks = restarted(ranks, fleet(size, UNEVEN))
        seen += read(ranks, 2)
    seen += read_epoch(ranks)
    assert set(seen) == set(range(UNEVEN))
    assert len(seen) - UNEVEN < sizes[-1]


def test_another_batch_size_keeps_the_global_batch() -> None:
    ranks = fleet(2, batch_size=6)
    seen = read(ranks, 5)
    ranks = restarted(ranks, fleet(3, batch_size=4))
    seen += read(ranks, 5) + read_epoch(ranks)
    assert sorted(seen) == list(range(EVEN))


@pytest.mark.parametrize("does_drop", [False, True])
def test_at_the_end_of_an_epoch_the_next_begins(does_drop: bool) -> None:
    ranks = fleet(2, 64, drop_last=does_drop)
    read(ranks, 8)
    after = restarted(ranks, fleet(4, 64, drop_last=does_drop))
    seen = read(after, 4)
    assert sorted(seen) == list(range(64))
    assert [one.epoch for one in after] == [1] * 4


@pytest.mark.parametrize("options", [{}, STATEFUL], ids=["plain", "stateful"])
@pytest.mark.parametrize("samples", [3, 10, 32])
def test_c54_at_the_border_of_small_epochs(samples: int, options: dict[str, Any]) -> None:
    """Fewer samples than ranks, less than one batch each, whole batches: the next epoch begins."""
    wanted = read_whole(4, 1, samples, **options)
    ranks = fleet(4, samples, **options)
    read(ranks, len(ranks[0]))
    assert read(restarted(ranks, fleet(4, samples, **options)), len(ranks[0])) == wanted


@pytest.mark.parametrize("samples", [3, 10])
def test_c54_no_whole_batch_is_said(samples: int) -> None:
    """With drop_last such an epoch has no batch at all: an error, not an endless search."""
    for rank in fleet(4, samples, drop_last=True):
        with pytest.raises(ScriptError, match="no batch in a whole epoch"):
            next(rank)


def test_ranks_that_read_the_same_part() -> None:
    """Tensor parallel pairs: two readers on four ranks, then two on two."""
    ranks = [built(lambda r=rank: loader(r // 2, 2)) for rank in range(4)]
    seen = [next(ranks[rank]).tolist() for _ in range(3) for rank in range(4)]
    positions = [one.position() for one in ranks]
    after = [built(lambda r=rank: loader(r, 2)) for rank in range(2)]
    for rank, one in enumerate(after):
        one.share_out(positions, rank, 2)
    once = [index for number, batch in enumerate(seen) if number % 2 == 0 for index in batch]
    assert sorted(once + read_epoch(after)) == list(range(EVEN))


def test_one_order_for_all_ranks_goes_on() -> None:
    """A loader that deals nothing out, at one place on all ranks."""

    def make() -> Any:
        return DataLoader(Numbers(), batch_size=4)

    ranks = [built(make), built(make)]
    read(ranks, 2)
    (one,) = restarted(ranks, [built(make)])
    assert next(one).tolist() == [8, 9, 10, 11]


def test_a_callable_goes_on() -> None:
    ranks = [built(lambda: get_batch), built(lambda: get_batch)]
    for one in ranks:
        next(one)
    (after,) = restarted(ranks, [built(lambda: get_batch)])
    assert after.handed_out == 1


class Split(Stream):
    """A stream that deals itself out."""

    def reshard_state(self, states: list[Any], rank: int, world_size: int) -> dict[str, int]:
        return {"place": max(state["place"] for state in states) + 100 * rank + world_size}


def test_a_stream_may_say_how() -> None:
    ranks = [built(lambda: DataLoader(Split(), batch_size=2)) for _ in range(2)]
    for _ in range(2):
        next(ranks[0])
    next(ranks[1])
    after = restarted(ranks, [built(lambda: DataLoader(Split(), batch_size=2)) for _ in range(3)])
    assert [next(one).tolist()[0] for one in after[:1]] == [8]


REFUSED = {
    "shuffled by each rank": (
        lambda rank: DataLoader(
            Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), generator=_seeded(rank))
        ),
        r"a RandomSampler, which deals nothing out to ranks.*Start with 2 ranks",
    ),
    "foreign batches": (
        lambda rank: DataLoader(Numbers(), batch_sampler=OddBatches(_replicas(rank), 4, False)),
        r"batches made by a OddBatches",
    ),
    "a sampler of its own order": (
        lambda rank: DataLoader(Numbers(), batch_size=4, sampler=Odd(Numbers(), 2, rank)),
        r"a Odd, whose order is its own",
    ),
    "a stream": (
        lambda rank: DataLoader(_stream(rank), batch_size=4),
        r"the state of a Stream says nothing about ranks.*reshard_state",
    ),
    "torchdata's stream": (
        lambda rank: StatefulDataLoader(_stream(rank), batch_size=4),
        r"StatefulDataLoader: the state of a Stream says nothing about ranks",
    ),
}


class Odd(DistributedSampler[Any]):
    """Reads in an order that torch's does not tell."""

    def __iter__(self) -> Any:
        return iter(range(self.rank, 20, self.num_replicas))


class OddBatches(BatchSampler):
    """Batches of whatever it likes."""


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _replicas(rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(Numbers(), num_replicas=2, rank=rank)


def _stream(rank: int) -> Stream:
    stream = Stream()
    stream.place = rank
    return stream


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    make, words = REFUSED[case]
    ranks = [built(lambda r=rank: make(r)) for rank in range(2)]
    for one in ranks:
        next(one)
    with pytest.raises(StateMismatch, match=words):
        restarted(ranks, [built(lambda: make(0))])


def test_without_state_it_begins_the_epoch_again_where_that_was_asked_for() -> None:
    def make() -> Batches:
        return built(lambda: DataLoader(Forgetful(), batch_size=4), on_missing_state="restart")

    ranks = [make(), make()]
    read(ranks, 8)
    (after,) = restarted(ranks, [make()])
    assert next(after).tolist() == [0, 1, 2, 3]
    assert after.epoch == 1


def test_other_order_is_refused() -> None:
    ranks = fleet(2)
    read(ranks, 1)
    other = built(lambda: loader(0, 1))
    other.source.sampler.seed = 6
    with pytest.raises(StateMismatch, match="another order"):
        other.share_out([one.position() for one in ranks], 0, 1)
    with pytest.raises(StateMismatch, match="no rank has read part 1 of 2"):
        built(lambda: loader(0, 1)).share_out([ranks[0].position()], 0, 1)


# -- C52: names of files ---------------------------------------------------------------------------


class Files(Dataset[Any]):
    """Shard files of a folder, in the order given."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return int(self.paths[index].read_text())


def shards(root: Path, order: list[int]) -> list[Path]:
    root.mkdir(parents=True)
    paths = []
    for number in order:
        path = root / f"shard-{number:03d}"
        path.write_text(str(number))
        paths.append(path)
    return paths


def test_c52_other_listing_order_is_refused_and_sorted_is_not(tmp_path: Path) -> None:
    """X4: the same 40 files, created in another order in another place."""
    here = shards(tmp_path / "a" / "data", list(range(40)))
    there = shards(tmp_path / "b" / "mnt" / "data", list(range(39, -1, -1)))
    one = built(lambda: DataLoader(Files(here), batch_size=4))
    assert next(one).tolist() == [0, 1, 2, 3]
    listed = built(lambda: DataLoader(Files(there), batch_size=4))
    with pytest.raises(StateMismatch, match="from the same in another order; sort"):
        listed.restore(one.position())
    sorted_there = built(lambda: DataLoader(Files(sorted(there)), batch_size=4))
    sorted_there.restore(one.position())
    assert next(sorted_there).tolist() == [4, 5, 6, 7]


def test_names_are_found_in_nested_datasets_and_count_below_their_root(tmp_path: Path) -> None:
    names = [f"part/{number}.bin" for number in range(4)]

    def data(root: str) -> Any:
        return Subset(ConcatDataset([Files([Path(root, name) for name in names])]), [0, 1])

    assert names_digest(data("/one")) == names_digest(data("/other/root")) != 0
    assert names_digest(Numbers()) == 0
    assert names_digest(data("/one").dataset) != names_digest(data("/one"))
    assert os.fspath(tmp_path)
