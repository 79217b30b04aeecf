"""Several runs of one job in a directory: which continues which, what counts, who is fenced off."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import local, make, save

from trainmover.checkpoint.choice import Asked
from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.commit import CommitOptions, commit
from trainmover.checkpoint.manifest import Authority, Origin
from trainmover.checkpoint.retention import KeepLast, histories, to_delete
from trainmover.checkpoint.survey import Committed, survey
from trainmover.checkpoint.tiers import pick
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import CheckpointFenced, NothingToRestore


def go_on(path: Path, run: str, step: int, *before: str, is_fork: bool = False) -> Committed:
    """A checkpoint of a run that was started from one of `before[0]`, which it continues or not."""
    state, image = make(0, 1, step, run_id=run)
    record = write_rank(local(path), state, image)
    origin = Origin(begun_from=before[0], history=() if is_fork else before)
    return commit(
        local(path),
        [record],
        Authority(term=1, generation=1),
        options=CommitOptions(created_at=1.0, origin=origin),
    )


def steps(path: Path) -> list[tuple[str, int]]:
    found = [(c.manifest.run_id, c.manifest.step) for c in survey(local(path)).committed]
    return sorted(found, key=lambda each: each[1])


def picked(path: Path, **asked: object) -> tuple[str, int]:
    chosen = pick({"durable": local(path)}, Asked(**asked))  # type: ignore[arg-type]
    assert chosen is not None
    return chosen.manifest.run_id, chosen.manifest.step


def test_what_is_kept_is_counted_over_the_starts_of_a_job(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(local(tmp_path), step, world_size=1, run_id="one")
    go_on(tmp_path, "two", 40, "one")
    prune(local(tmp_path), KeepLast(3), run_id="two", history=("one",))
    assert steps(tmp_path) == [("one", 20), ("one", 30), ("two", 40)]
    go_on(tmp_path, "three", 50, "two", "one")
    prune(local(tmp_path), KeepLast(2), run_id="three", history=("two", "one"))
    assert steps(tmp_path) == [("two", 40), ("three", 50)]


def test_a_fork_leaves_alone_what_it_was_begun_from(tmp_path: Path) -> None:
    for step in (10, 20):
        save(local(tmp_path), step, world_size=1, run_id="one")
    go_on(tmp_path, "fork", 30, "one", is_fork=True)
    prune(local(tmp_path), KeepLast(1), run_id="fork")
    assert len(steps(tmp_path)) == 3


def test_a_person_prunes_jobs_and_not_starts(tmp_path: Path) -> None:
    save(local(tmp_path), 10, world_size=1, run_id="one")
    go_on(tmp_path, "two", 20, "one")
    go_on(tmp_path, "fork", 15, "one", is_fork=True)
    committed = survey(local(tmp_path)).committed
    assert histories(committed) == [("two", "one"), ("fork",)]
    (gone,) = to_delete(committed, KeepLast(1))
    assert gone.startswith("step-0000000010-")


def test_a_run_that_is_continued_commits_nothing_more(tmp_path: Path) -> None:
    """P7: a job that was thought dead and started again elsewhere wakes up."""
    save(local(tmp_path), 10, world_size=1, run_id="one")
    go_on(tmp_path, "two", 20, "one")
    with pytest.raises(CheckpointFenced, match="run two, which continues one"):
        save(local(tmp_path), 30, world_size=1, run_id="one")
    go_on(tmp_path, "fork", 25, "two", is_fork=True)
    go_on(tmp_path, "two", 30, "one")  # a fork is another experiment: nobody is fenced off


def test_leftovers_of_a_continued_run_go(tmp_path: Path) -> None:
    save(local(tmp_path), 10, world_size=1, run_id="one")
    state, image = make(0, 1, 20, run_id="one")
    write_rank(local(tmp_path), state, image)  # killed here
    go_on(tmp_path, "two", 15, "one")
    prune(local(tmp_path), KeepLast(9), run_id="two", history=("one",))
    assert not list(tmp_path.glob("writing-*"))


def test_whoever_went_back_by_name_goes_on_from_there(tmp_path: Path) -> None:
    for step in (100, 200):
        save(local(tmp_path), step, world_size=1, run_id="one")
    go_on(tmp_path, "back", 150, "one", is_fork=True)
    assert picked(tmp_path) == ("back", 150)
    (shard,) = tmp_path.glob("step-0000000150-*/rank-00000.safetensors")
    shard.write_bytes(b"")
    assert picked(tmp_path) == ("one", 200), "what it came from, if it has nothing whole"


def test_of_unrelated_runs_the_one_that_got_furthest(tmp_path: Path) -> None:
    save(local(tmp_path), 50, world_size=1, run_id="b")
    save(local(tmp_path), 60, world_size=1, run_id="a")
    assert picked(tmp_path) == ("a", 60)
    assert picked(tmp_path, run_id="b") == ("b", 50)


def test_of_two_forks_the_one_that_got_further(tmp_path: Path) -> None:
    save(local(tmp_path), 100, world_size=1, run_id="one")
    go_on(tmp_path, "left", 110, "one", is_fork=True)
    go_on(tmp_path, "right", 105, "one", is_fork=True)
    go_on(tmp_path, "right-again", 120, "right")
    assert picked(tmp_path) == ("right-again", 120)


def test_runs_that_name_each_other_in_a_circle_end_nowhere(tmp_path: Path) -> None:
    go_on(tmp_path, "a", 10, "b", is_fork=True)
    go_on(tmp_path, "b", 20, "a", is_fork=True)
    save(local(tmp_path), 5, world_size=1, run_id="c")
    assert picked(tmp_path) == ("c", 5)


def test_a_running_job_goes_back_into_its_history_up_to_where_it_began(tmp_path: Path) -> None:
    """And into none of what an earlier run has shown to have left itself."""
    for step, lineage in ((10, 1), (28, 1), (20, 2), (30, 2), (40, 2), (35, 3)):
        save(local(tmp_path), step, world_size=1, run_id="one", lineage=lineage)
    save(local(tmp_path), 60, world_size=1, run_id="other")
    asked = {"run_id": "two", "is_required": True, "history": ("one",)}
    assert picked(tmp_path, **asked, begun_at=(35, 3)) == ("one", 35)
    assert picked(tmp_path, **asked, begun_at=(35, 2)) == ("one", 30)
    assert picked(tmp_path, **asked, begun_at=(28, 2)) == ("one", 20)
    assert picked(tmp_path, **asked, begun_at=(19, 2)) == ("one", 10)
    with pytest.raises(NothingToRestore):
        picked(tmp_path, **asked)
    go_on(tmp_path, "two", 50, "one")
    assert picked(tmp_path, **asked, begun_at=(35, 3)) == ("two", 50)
    left = ((34, 7),)
    assert picked(tmp_path, **asked, begun_at=(35, 3), left=left) == ("one", 30)
