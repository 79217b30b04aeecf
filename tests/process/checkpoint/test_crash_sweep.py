"""A save that is killed at every call in turn leaves the old checkpoint or the new one (CK-1).

A real process saves step 20 over step 10, commits, prunes to one, and is killed at the Nth call
that changes a file system, for every N until it gets through. After each death a reader finds old
or new, complete; the next saves go through and leave nothing of the dead one behind (C01, C03,
C05, C09, C25).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.checkpoint.stage import TENSORS, save_and_prune
from tests.process.checkpoint.staging import CLASSES, Stage, build_killer, can_trace
from tests.unit.checkpoint.sample import local, make

from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import pick

MOST_CALLS = 2000
"""Far more than a save makes: the sweep ends by itself long before."""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with step 10 committed."""
    root = tmp_path_factory.mktemp("before") / "root"
    save_and_prune(root, 10)
    return root


def assert_whole(root: Path, name: str, step: int) -> None:
    """Every byte of the checkpoint is what was saved."""
    checkpoint = open_checkpoint(local(root), name)
    assert not checkpoint.verify()
    for rank in range(2):
        state, image = make(rank, 2, step, tensors=TENSORS)
        assert checkpoint.rank_state(rank) == state
        buffer = bytearray(b"\xee" * len(image))
        checkpoint.read_image(rank, memoryview(buffer))
        assert buffer == image


def old_or_new(root: Path) -> int:
    """The step that a restart takes; whatever is committed is complete."""
    committed = survey(local(root)).committed
    for item in committed:
        assert_whole(root, item.name, item.manifest.step)
    steps = [item.manifest.step for item in committed]
    assert steps in ([10], [10, 20], [20])
    chosen = pick({"durable": local(root)})
    assert chosen is not None and chosen.manifest.step == steps[-1]
    return steps[-1]


def assert_next_saves_work(root: Path) -> None:
    """The save that died is repeated, one more follows, and nothing else is left."""
    assert save_and_prune(root, 20) == []
    assert old_or_new(root) == 20
    assert save_and_prune(root, 30) == []
    assert [path.name for path in root.iterdir()] == ["step-0000000030-l1-g1-r0ca441"]
    names = {path.name for path in (root / "step-0000000030-l1-g1-r0ca441").iterdir()}
    manifest = survey(local(root)).committed[0].manifest
    assert names == {"MANIFEST.json", *(file.path for file in manifest.files)}
    assert_whole(root, "step-0000000030-l1-g1-r0ca441", 30)


def sweep(kill_at: Callable[[Path, int], str], before: Path, folder: Path, every: int) -> list[int]:
    """Kill at every `every`th call until the save gets through; the step found after each."""
    seen: list[int] = []
    for number in range(1, MOST_CALLS, every):
        root = folder / str(number)
        shutil.copytree(before, root)
        outcome = kill_at(root, number)
        assert outcome in ("killed", "done"), outcome
        seen.append(old_or_new(root))
        assert_next_saves_work(root)
        shutil.rmtree(root)
        if outcome == "done":
            assert seen == sorted(seen), "the new one never goes away again"
            return seen
    raise AssertionError(f"still not through after {MOST_CALLS} calls")


def preloaded(before: Path, folder: Path, every: int) -> int:
    """All calls of all threads, by the preloaded library; how many deaths there were."""
    library = build_killer(folder)
    if library is None:
        pytest.skip("not shown: no C compiler")
    with Stage(library) as stage:
        seen = sweep(lambda root, n: stage.save(root, 20, arm=n), before, folder, every)
    assert {10, 20} == set(seen)
    return len(seen) - 1


def traced(before: Path, folder: Path, every: int) -> int:
    """One class of calls after the other, by strace; how many deaths there were."""
    if not can_trace():
        pytest.skip("not shown: no strace, or it may not attach")
    deaths = 0
    with Stage() as stage:
        for names in CLASSES:

            def kill_at(root: Path, number: int, names: str = names) -> str:
                return stage.save(root, 20, inject=(f"{names}:signal=KILL:when={number}",))

            deaths += len(sweep(kill_at, before, folder, every)) - 1
    return deaths


def test_killed_at_every_fifth_call(before: Path, tmp_path: Path) -> None:
    """By a preloaded library, in all threads; about a fifth of the whole."""
    assert preloaded(before, tmp_path, every=5) > 20


def test_killed_by_strace(before: Path, tmp_path: Path) -> None:
    """By strace at the system call itself; every 17th of each class."""
    assert traced(before, tmp_path, every=17) > 8


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_at_every_call(before: Path, tmp_path: Path) -> None:
    assert preloaded(before, tmp_path, every=1) > 100


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_by_strace_at_every_call(before: Path, tmp_path: Path) -> None:
    assert traced(before, tmp_path, every=1) > 100


def test_no_descriptor_leaks(tmp_path: Path) -> None:
    """B2, C29: saves and prunes leave no open file and nothing on disk but the newest."""
    for step in range(10, 40, 10):
        save_and_prune(tmp_path, step)
    before = set(os.listdir("/proc/self/fd"))
    for step in range(40, 400, 10):
        save_and_prune(tmp_path, step)
    # Others of this process may have been closed meanwhile.
    more = set(os.listdir("/proc/self/fd")) - before
    assert len(more) <= 1, more  # the listing itself
    assert len(os.listdir(tmp_path)) == 1
