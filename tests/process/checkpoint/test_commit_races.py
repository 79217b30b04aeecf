"""Who may commit, and what happens when several do (CK-1, CK-5)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import RUN, local, make, save

from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.failures import Retries
from trainmover.checkpoint.local_store import LocalStore
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.retention import KeepLast
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import pick
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import (
    CheckpointFenced,
    ShardMissing,
    StorageFailed,
)


def committed(path: Path) -> list[int]:
    """Steps committed, each of them complete."""
    found = survey(local(path)).committed
    for item in found:
        assert not open_checkpoint(local(path), item.name).verify()
    return [item.manifest.step for item in found]


def test_fences(tmp_path: Path) -> None:
    """CK-5, P7: who has been replaced commits nothing, however late."""
    store = local(tmp_path)
    save(store, 10, term=2, generation=3)
    state, image = make(0, 1, 20, generation=3)
    record = write_rank(store, state, image)
    with pytest.raises(CheckpointFenced, match="term 2"):
        commit(store, [record], Authority(term=1, generation=3))
    with pytest.raises(CheckpointFenced, match="generation 3"):
        commit(store, [record], Authority(term=2, generation=2))
    assert commit(store, [record], Authority(term=2, generation=4)).manifest.step == 20


def test_committing_twice_is_harmless(tmp_path: Path) -> None:
    """A controller that died after the commit says it again in its next life."""
    store = local(tmp_path)
    first = save(store, 10)
    again = save(store, 10, term=2)
    assert again.name == first.name
    assert again.manifest.term == 1
    assert committed(tmp_path) == [10]


def test_two_commits_at_the_same_time(tmp_path: Path) -> None:
    """One of them makes the checkpoint, the other finds it or a missing shard; never half."""
    store = local(tmp_path)
    records = [write_rank(store, *make(rank, 4, 10)) for rank in range(4)]
    errors: list[BaseException] = []

    def run() -> None:
        try:
            commit(store, records, Authority(term=1, generation=1))
        except (ShardMissing, StorageFailed) as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert len(errors) < 4
    assert committed(tmp_path) == [10]


def test_ranks_write_at_the_same_time(tmp_path: Path) -> None:
    """Several machines, one directory: nobody makes the other's directory fail."""
    store = LocalStore(tmp_path / "root", retries=Retries(attempts=1))
    records: list[object] = [None] * 6

    def run(rank: int) -> None:
        records[rank] = write_rank(store, *make(rank, 6, 10))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    commit(store, records, Authority(term=1, generation=1))  # type: ignore[arg-type]
    assert committed(tmp_path / "root") == [10]


def test_a_reader_never_finds_nothing(tmp_path: Path) -> None:
    """C36: while a job saves and prunes to one, somebody chooses and reads in a tight loop."""
    store = local(tmp_path)
    save(store, 10)
    steps: list[int] = []
    problems: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                chosen = pick({"durable": store})
                assert chosen is not None
                steps.append(chosen.manifest.step)
        except BaseException as error:  # shown by the test
            problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(20, 10000, 10):
            save(store, step)
            prune(store, KeepLast(1), run_id=RUN)
            if problems or (step >= 300 and len(set(steps)) > 3):
                break
    finally:
        is_over.set()
        reader.join(timeout=60)
    assert not reader.is_alive()
    assert not problems, problems
    assert steps == sorted(steps) and len(set(steps)) > 3
