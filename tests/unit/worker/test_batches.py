"""Batches: undo, position and its restoring, for every kind of loader in one process."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from tests.unit.worker.loader_kinds import (
    BATCH,
    SAMPLES,
    EagerShuffle,
    Forgetful,
    LazyDraws,
    Numbers,
    built,
    get_batch,
    interrupted,
    moved,
    replicas,
    seed_all,
    single_process_kinds,
    step,
    undisturbed,
)
from torch.utils.data import DataLoader, TensorDataset

import trainmover
from trainmover.errors import ScriptError, StateMismatch, TrackError
from trainmover.state.rng import capture_rng, restore_rng
from trainmover.worker.batches import Batches

KINDS = single_process_kinds()
PER_EPOCH = 6
STEPS = 2 * PER_EPOCH + 3


@pytest.mark.parametrize("kind", KINDS)
def test_undone_steps_see_the_same_batches_and_numbers(kind: str) -> None:
    assert interrupted(KINDS[kind], STEPS) == undisturbed(KINDS[kind], STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_joiner_goes_on_exactly_from_every_position(kind: str) -> None:
    expected = undisturbed(KINDS[kind], STEPS)
    for place in range(STEPS):
        assert moved(KINDS[kind], STEPS, {place}) == expected, f"moved at step {place}"


@pytest.mark.parametrize("early", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_joiner_with_a_head_start_goes_on_exactly(kind: str, early: int) -> None:
    expected = undisturbed(KINDS[kind], STEPS)
    for place in range(STEPS):
        assert moved(KINDS[kind], STEPS, {place}, early) == expected, f"moved at step {place}"


def test_a_head_start_draws_an_epoch_s_order_once() -> None:
    leaver = built(KINDS["eager"])
    hint = [next(leaver), leaver.position()][1]
    target = [next(leaver), next(leaver), leaver.position()][2]
    joiner = built(KINDS["eager"])
    joiner.restore(hint)
    with mock.patch.object(EagerShuffle, "__iter__", side_effect=AssertionError("drawn again")):
        joiner.restore(target)
        assert next(joiner).tolist() == next(leaver).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_several_moves_in_one_epoch(kind: str) -> None:
    moves = {1, 2, 4, PER_EPOCH, PER_EPOCH + 1, STEPS - 1}
    assert moved(KINDS[kind], STEPS, moves) == undisturbed(KINDS[kind], STEPS)


def test_skipped_samples_are_not_read() -> None:
    leaver = built(KINDS["shuffle"])
    for _ in range(4):
        next(leaver)
    joiner = built(KINDS["shuffle"])
    joiner.restore(leaver.position())
    assert joiner.source.dataset.read == []
    assert next(joiner).tolist() == next(leaver).tolist()
    assert len(joiner.source.dataset.read) == BATCH


def test_epochs_go_on_and_the_sampler_is_told() -> None:
    batches = Batches(replicas())
    assert len(batches) == PER_EPOCH
    orders: list[list[int]] = []
    for epoch in range(3):
        order: list[int] = []
        for index in range(PER_EPOCH):
            order += next(batches).tolist()
            assert (batches.epoch, batches.handed_out) == (epoch, index + 1)
        assert batches.source.sampler.epoch == epoch
        orders.append(order)
    assert len({tuple(order) for order in orders}) == 3
    assert all(len(set(order)) == len(order) for order in orders)


def test_an_attempt_that_reads_fewer_batches_keeps_the_rest_for_the_next_step() -> None:
    expected = undisturbed(KINDS["sequential"], 4)
    batches = built(KINDS["sequential"])
    seed_all(12)
    batches.begin_attempt()
    boundary = capture_rng()
    step(batches, reads=3)
    batches.rewind()
    restore_rng(boundary)
    seen = [step(batches)]
    position = batches.position()
    batches.begin_attempt()
    seen.append(step(batches))
    batches.begin_attempt()
    seen += [step(batches), step(batches)]
    assert seen == expected
    joiner = built(KINDS["sequential"])
    joiner.restore(position)
    assert next(joiner).tolist() == expected[1][0]


@pytest.mark.parametrize("kind", ["shuffle", "augmented", "stateful_shuffle"])
def test_an_attempt_that_drew_other_numbers_reads_again(kind: str) -> None:
    """Invented values sent the undone attempt another way, so it drew more than the repeat."""
    expected = built(KINDS[kind])
    seed_all(12)
    wanted = [step(expected) for _ in range(PER_EPOCH + 4)]
    batches = built(KINDS[kind])
    seed_all(12)
    seen = []
    for _ in range(PER_EPOCH + 4):
        batches.begin_attempt()
        boundary = capture_rng()
        torch.rand(3)
        step(batches, reads=2)
        batches.rewind()
        restore_rng(boundary)
        seen.append(step(batches))
    assert seen == wanted


def test_rewinding_twice_is_rewinding_once() -> None:
    batches = built(KINDS["shuffle"])
    batches.begin_attempt()
    boundary = capture_rng()
    first = step(batches, reads=2)
    for reads in (1, 0, 2):
        batches.rewind()
        restore_rng(boundary)
        assert step(batches, reads=reads) == first[: 4 * reads]


def test_counts_are_undone() -> None:
    batches = built(KINDS["sequential"])
    next(batches)
    batches.begin_attempt()
    next(batches)
    batches.rewind()
    assert (batches.epoch, batches.handed_out) == (0, 1)


def test_position_is_equal_after_an_undo() -> None:
    for make in KINDS.values():
        batches = built(make)
        next(batches)
        batches.begin_attempt()
        position = batches.position()
        boundary = capture_rng()
        next(batches)
        batches.rewind()
        restore_rng(boundary)
        assert batches.position() == position


# -- rank, warm, close -----------------------------------------------------------------------------


def test_set_rank_reads_the_other_rank_s_part() -> None:
    batches = Batches(replicas())
    for _ in range(3):
        next(batches)
    other = replicas()
    other.sampler.rank = 0
    expected = [batch.tolist() for batch in other]
    assert batches.set_rank(0)
    assert [next(batches).tolist() for _ in range(3)] == expected[3:]


def test_set_rank_then_restore_of_the_leaver_s_position() -> None:
    leaver = Batches(replicas())
    for _ in range(8):
        next(leaver)
    standby_loader = replicas()
    standby_loader.sampler.rank = 0
    joiner = Batches(standby_loader)
    next(joiner)
    assert joiner.set_rank(1)
    joiner.restore(leaver.position())
    assert [next(joiner).tolist() for _ in range(9)] == [next(leaver).tolist() for _ in range(9)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_joiner_that_is_given_another_rank_reads_that_one_s_part(workers: int) -> None:
    leaver = Batches(replicas())  # rank 1
    for _ in range(3):
        next(leaver)
    standby_loader = replicas(num_workers=workers)
    standby_loader.sampler.rank = 0
    joiner = Batches(standby_loader)
    joiner.restore(leaver.position())  # a head start for a plan that is aborted
    assert joiner.set_rank(1)
    next(leaver)
    joiner.restore(leaver.position())
    assert [next(joiner).tolist() for _ in range(5)] == [next(leaver).tolist() for _ in range(5)]
    joiner.close()


def test_a_rank_held_by_the_dataset_is_not_changed_in_place() -> None:
    data = Numbers()
    data.rank = 3  # type: ignore[attr-defined]
    assert not Batches(DataLoader(data, batch_size=2)).set_rank(1)
    assert Batches(DataLoader(Numbers(), batch_size=2)).set_rank(1)
    assert Batches(get_batch).set_rank(1)


@pytest.mark.parametrize("kind", [*KINDS, "callable"])
def test_warm_changes_nothing(kind: str) -> None:
    make = {**KINDS, "callable": lambda: get_batch}[kind]
    plain = built(make)
    seed_all(12)
    expected = [step(plain) for _ in range(8)]
    batches = built(make)
    seed_all(12)
    position = batches.position()
    before = capture_rng()
    batches.warm()
    assert capture_rng() == before
    assert batches.position() == position
    assert [step(batches) for _ in range(8)] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_close_keeps_the_place(kind: str) -> None:
    expected = undisturbed(KINDS[kind], 9)
    batches = built(KINDS[kind])
    seed_all(12)
    seen = []
    for _ in range(9):
        seen.append(step(batches))
        batches.close()
    assert seen == expected


# -- what is refused -------------------------------------------------------------------------------


def test_an_iterable_dataset_without_state_is_refused() -> None:
    with pytest.raises(TrackError, match="loader has no state_dict and its dataset is iterable"):
        Batches(DataLoader(Forgetful(), batch_size=BATCH))


def test_replay_reads_and_drops() -> None:
    def make() -> Any:
        return DataLoader(Forgetful(), batch_size=BATCH)

    leaver = built(make, on_missing_state="replay")
    for _ in range(9):
        next(leaver)
    joiner = built(make, on_missing_state="replay")
    joiner.restore(leaver.position())
    assert [next(joiner).tolist() for _ in range(9)] == [next(leaver).tolist() for _ in range(9)]


def test_restart_begins_the_epoch_again() -> None:
    def make() -> Any:
        return DataLoader(Forgetful(), batch_size=BATCH)

    leaver = built(make, on_missing_state="restart")
    for _ in range(9):
        next(leaver)
    joiner = built(make, on_missing_state="restart")
    joiner.restore(leaver.position())
    assert next(joiner).tolist() == [0, 1, 2, 3]
    assert joiner.epoch == 1


def test_a_sampler_that_draws_all_along_is_refused() -> None:
    batches = Batches(DataLoader(Numbers(), batch_size=BATCH, sampler=LazyDraws()))
    with pytest.raises(TrackError, match="draws from the global random generator in the middle"):
        for _ in range(3):
            next(batches)


def test_other_data_is_noticed() -> None:
    leaver = Batches(DataLoader(Numbers(), batch_size=BATCH))
    next(leaver)
    joiner = Batches(DataLoader(Numbers(SAMPLES + BATCH), batch_size=BATCH))
    with pytest.raises(StateMismatch, match="7 batches here and 6"):
        joiner.restore(leaver.position())


def test_positions_of_another_kind_are_refused() -> None:
    loader = Batches(DataLoader(Numbers(), batch_size=BATCH))
    with pytest.raises(StateMismatch, match="callable"):
        loader.restore(Batches(get_batch).position())
    with pytest.raises(StateMismatch, match="decoded"):
        loader.restore(b"rubbish")


def test_wrong_sources_are_refused() -> None:
    loader = DataLoader(Numbers(), batch_size=BATCH)
    with pytest.raises(TrackError, match=r"not iter\(loader\)"):
        Batches(iter(loader))
    with pytest.raises(TrackError, match="position can't be saved"):
        Batches(iter([1]).__next__)
    with pytest.raises(TrackError, match="takes a DataLoader or a callable"):
        Batches(3)  # type: ignore[arg-type]
    with pytest.raises(TrackError, match="prefetch= is for callables"):
        Batches(loader, prefetch=1)
    with pytest.raises(TrackError, match="expected one of"):
        Batches(loader, on_missing_state="guess")
    with pytest.raises(TrackError, match="list, which has no state_dict"):
        Batches([1, 2])


def test_a_generator_that_the_dataset_owns_is_refused_by_name() -> None:
    data = Numbers()
    data.noise = random.Random(3)  # type: ignore[attr-defined]
    loader = DataLoader(data, batch_size=BATCH)
    with pytest.raises(TrackError, match="random generator of its own, 'noise'"):
        Batches(loader)
    assert next(Batches(loader, on_missing_state="restart")).tolist() == [0, 1, 2, 3]


def test_an_empty_epoch_is_an_error() -> None:
    empty = DataLoader(TensorDataset(torch.ones(1)), batch_size=2, drop_last=True)
    with pytest.raises(ScriptError, match="no batch in a whole epoch"):
        next(Batches(empty))


def test_nothing_is_kept_without_attempts() -> None:
    batches = built(KINDS["shuffle"])
    for _ in range(30):
        next(batches)
    assert batches._attempt == []


# -- C48: the order of iter() and loading ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_before", [True, False])
def test_c48_an_iterator_of_the_script_changes_nothing(kind: str, is_before: bool) -> None:
    """The script has made iter(loader) before the position is loaded, or makes one after it."""
    expected = undisturbed(KINDS[kind], 9)
    leaver = built(KINDS[kind])
    seed_all(12)
    seen = []
    for _ in range(4):
        leaver.begin_attempt()
        seen.append(step(leaver))
    position, boundary = leaver.position(), capture_rng()
    leaver.close()
    joiner = built(KINDS[kind])
    if is_before and kind not in ("stream_with_state", "stateful_stream"):
        iter(joiner.source)
    joiner.restore(position)
    if not is_before and kind in ("sequential", "shuffle", "distributed", "drop_last"):
        iter(joiner.source)
    restore_rng(boundary)
    for _ in range(5):
        joiner.begin_attempt()
        seen.append(step(joiner))
    joiner.close()
    assert seen == expected


def test_c48_a_loader_wrapped_twice_is_refused() -> None:
    batches = built(KINDS["shuffle"])
    with pytest.raises(TrackError, match="only once"):
        Batches(batches)
    loader = DataLoader(Numbers(), batch_size=BATCH)
    told: list[str] = []

    def main(job: trainmover.Job) -> None:
        job.batches(loader)
        with pytest.raises(TrackError, match="the same DataLoader twice") as refused:
            job.batches(loader)
        told.append(str(refused.value))

    with pytest.raises(ScriptError, match=r"job\.steps"):
        trainmover.run(main)
    assert told
