"""What is kept, what is deleted, and in which order (CK-2, CK-4)."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from tests.unit.checkpoint.sample import local, make, save

from trainmover.checkpoint.cadence_text import parse_retention
from trainmover.checkpoint.cleaning import clean_leftovers, delete_checkpoint, prune
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.retention import KeepAny, KeepEvery, KeepLast, to_delete
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import pick
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import ConfigError

RUN = "run-a"


def steps(path: Path) -> list[int]:
    return [c.manifest.step for c in survey(local(path)).committed]


def test_numbers_not_names(tmp_path: Path) -> None:
    """C16: around 10000 the newest stay."""
    for step in range(9960, 10041, 20):
        save(local(tmp_path), step)
        prune(local(tmp_path), KeepLast(3), run_id=RUN)
    assert steps(tmp_path) == [10000, 10020, 10040]


def test_rules_combine(tmp_path: Path) -> None:
    for step in range(10, 80, 10):
        save(local(tmp_path), step)
    rule = KeepAny((KeepLast(2), KeepEvery(30)))
    prune(local(tmp_path), rule, run_id=RUN)
    assert steps(tmp_path) == [30, 60, 70]
    assert parse_retention("last 2 or every 30") == rule


@pytest.mark.parametrize("text", ["last 0", "last -1", "last x", "every 0", "", "some"])
def test_bad_limits_are_refused(text: str) -> None:
    """C18."""
    with pytest.raises(ConfigError):
        parse_retention(text)
    with pytest.raises(ConfigError, match="from 1"):
        KeepLast("3")  # type: ignore[arg-type]


def test_the_newest_good_one_always_stays(tmp_path: Path) -> None:
    save(local(tmp_path), 7)
    save(local(tmp_path), 11)
    prune(local(tmp_path), KeepEvery(1000), run_id=RUN)
    assert steps(tmp_path) == [11]


def test_no_good_one_goes_for_a_suspect_one(tmp_path: Path) -> None:
    """C137: suspects don't count, and only the newest of them is kept aside."""
    for step in (10, 20):
        save(local(tmp_path), step)
    for step in (30, 40, 50):
        save(local(tmp_path), step, is_suspect=True)
    prune(local(tmp_path), KeepLast(2), run_id=RUN)
    assert steps(tmp_path) == [10, 20, 50]


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    save(local(tmp_path), 10, run_id="other")
    save(local(tmp_path), 20)
    save(local(tmp_path), 30)
    prune(local(tmp_path), KeepLast(1), run_id=RUN)
    assert sorted(steps(tmp_path)) == [10, 30]


def test_two_runs_in_one_directory(tmp_path: Path) -> None:
    """The same steps of another run, or its leftovers, are never in the way."""
    write_rank(local(tmp_path), *make(0, 2, 10, run_id="other"))
    save(local(tmp_path), 10)
    save(local(tmp_path), 10, run_id="third")
    assert steps(tmp_path) == [10, 10]
    assert {c.manifest.run_id for c in survey(local(tmp_path)).committed} == {RUN, "third"}


def test_copies_by_hand_are_never_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        found = save(local(tmp_path), step)
        if step == 10:
            shutil.copytree(tmp_path / found.name, tmp_path / "step-0000000099-l1-g1-r0ca441")
    prune(local(tmp_path), KeepLast(1), run_id=RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000000030-l1-g1-r0ca441",
        "step-0000000099-l1-g1-r0ca441",
    ]


def test_a_deletion_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    """Manifest first: from then on it is no checkpoint, and its rest is recognised as ours."""
    old = save(local(tmp_path), 10)
    save(local(tmp_path), 20)
    folder = tmp_path / old.name
    (folder / "MANIFEST.json").rename(folder / "MANIFEST.deleted.json")
    (folder / "rank-00000.msgpack").unlink()
    assert steps(tmp_path) == [20]
    clean_leftovers(local(tmp_path), run_id=RUN)
    assert not folder.exists()


def test_foreign_files_stay(tmp_path: Path) -> None:
    found = save(local(tmp_path), 10)
    note = tmp_path / found.name / "notes.txt"
    note.write_text("mine")
    assert not delete_checkpoint(local(tmp_path), found.name)
    assert [path.name for path in (tmp_path / found.name).iterdir()] == ["notes.txt"]


def test_leftovers_of_older_saves_only(tmp_path: Path) -> None:
    """A save that may be running is newer than what is committed, or named as active."""
    for step in (10, 30):
        state, image = make(0, 2, step)
        write_rank(local(tmp_path), state, image)
    save(local(tmp_path), 20)
    clean_leftovers(local(tmp_path), run_id=RUN, active=["step-0000000010-l1-g1-r0ca441"])
    assert (tmp_path / "writing-step-0000000010-l1-g1-r0ca441").exists()
    cleaned = clean_leftovers(local(tmp_path), run_id=RUN)
    assert cleaned.leftovers == ("writing-step-0000000010-l1-g1-r0ca441",)
    assert (tmp_path / "writing-step-0000000030-l1-g1-r0ca441").exists()
    clean_leftovers(local(tmp_path), run_id="other")
    assert (tmp_path / "writing-step-0000000030-l1-g1-r0ca441").exists()


def name(step: object) -> str:
    """P(n) of the fixtures: our name with the number replaced by whatever stands there."""
    number = f"{step:0>10}" if isinstance(step, int) else step
    return f"step-{number}-l1-g1-r0ca441"


def odd_directory(root: Path) -> set[str]:
    """X1: temporary names, odd numbers, dangling and looping links, FIFOs, 5000 empty files."""
    before = set(os.listdir(root))
    twenty = root / name(20)
    (root / name(30)).mkdir()
    (root / name(40)).write_bytes(b"garbage")
    for copy in (
        f"{name(20)}.tmp",
        f"tmp.{name(50)}",
        f".{name(50)}.partial",
        f"{name(20)} (copy)",
        f"{name(20)}-merged",
        f"{name(20)}~",
        f".snapshot/{name(200)}",
    ):
        shutil.copytree(twenty, root / copy)
    for number in ("-1", "030", "3e1", "30.0", "NaN", "9999999999999999999", "", "\uff13\uff10"):
        (root / name(number)).mkdir()
    (root / name(60)).symlink_to("missing")
    (root / name(70)).symlink_to(name(70))
    (root / name(80)).symlink_to(name(20))
    outside = root.parent / "outside"
    shutil.copytree(twenty, outside)
    (root / name(90)).symlink_to(outside)
    (root / name(100)).mkdir(mode=0)
    (root / ".nfs0000000000000001").write_bytes(b"")
    (root / "lost+found").mkdir(mode=0o700)
    os.mkfifo(root / name(110))
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(root)  # a socket's path is short
        try:
            listener.bind(name(120))
        finally:
            os.chdir(here)
    for number in range(1, 5001):
        (root / f"junk-{number:05d}").touch()
    os.makedirs(root / "with\nnewline")
    os.makedirs(os.fsencode(root) + b"/invalid-\xff\xfe")
    return set(os.listdir(root)) - before


def test_an_odd_directory(tmp_path: Path) -> None:
    """X1, C05: nothing foreign is chosen, deleted or waited for; save, list, load, prune work."""
    root = tmp_path / "root"
    store = local(root)
    save(store, 10)
    save(store, 20)
    odd = odd_directory(root)
    assert steps(root) == [10, 20]
    chosen = pick({"durable": store})
    assert chosen is not None and chosen.name == name(20)
    thirty = save(store, 30)  # an empty directory has its name
    assert thirty.name == name(30)
    for folder in (20, 30):
        assert not open_checkpoint(store, name(folder)).verify()
    assert to_delete(survey(store).committed, KeepLast(2), run_id=RUN) == (name(10),)
    done = prune(store, KeepLast(2), run_id=RUN)
    assert done.deleted == (name(10),)
    assert done.leftovers == ()
    assert steps(root) == [20, 30]
    assert odd <= set(os.listdir(root))
    forty = save(store, 40)  # a file of somebody else has its name
    assert forty.name == f"{name(40)}~2"
    assert (root / name(40)).read_bytes() == b"garbage"
    (root / name(100)).chmod(0o700)
