"""A shadow's script leaves no trace, and afterwards every function is what it was."""

from __future__ import annotations

import builtins
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainmover.errors import RehearsalRefused
from trainmover.rehearsal.guard import Guard


class Shadow:
    """A guard over one directory, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.scratch = folder / "scratch"
        self.guard = Guard(self.scratch, (), self.place, self.told.append)

    def place(self) -> str:
        frame = sys._getframe(1)
        while frame.f_code.co_filename != __file__ or frame.f_code is self.place.__code__:
            frame = frame.f_back  # type: ignore[assignment]
        return f"test_guard.py:{frame.f_lineno}"


@pytest.fixture
def shadow(tmp_path: Path) -> Iterator[Shadow]:
    made = Shadow(tmp_path)
    yield made
    made.guard.end()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"<dir>"
        for path in sorted(folder.rglob("*"))
    }


def test_a_script_that_plays_rank_0_changes_nothing(shadow: Shadow, tmp_path: Path) -> None:
    live = tmp_path / "live"
    (live / "out").mkdir(parents=True)
    (live / "train.log").write_text("precious")
    (live / "out" / "model.pt").write_bytes(b"checkpoint")
    before = snapshot(live)
    shadow.guard.begin()
    with open(live / "train.log", "w") as log:
        log.write("begins anew")
    shutil.rmtree(live / "out")
    assert not (live / "out").exists()
    os.makedirs(live / "out" / "run")
    torch.save({"a": torch.ones(3)}, live / "out" / "model.pt")
    assert torch.equal(torch.load(live / "out" / "model.pt")["a"], torch.ones(3))
    assert sorted(os.listdir(live / "out")) == ["model.pt", "run"]
    assert (live / "train.log").read_text() == "begins anew"
    os.rename(live / "train.log", live / "old.log")
    assert not (live / "train.log").exists()
    (live / "old.log").unlink()
    with pytest.raises(FileNotFoundError):
        (live / "old.log").read_text()
    shadow.guard.end()
    assert snapshot(live) == before
    assert shadow.told
    assert all(text.startswith("test_guard.py:") for text in shadow.told)
    assert all("if job.is_primary" in text for text in shadow.told)


def test_appending_continues_a_copy(shadow: Shadow, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    shadow.guard.begin()
    with log.open("a") as file:
        file.write("two\n")
    assert log.read_text() == "one\ntwo\n"
    shadow.guard.end()
    assert log.read_text() == "one\n"


def test_errors_are_those_of_the_real_tree(shadow: Shadow, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    shadow.guard.begin()
    with pytest.raises(FileExistsError):
        (tmp_path / "there").mkdir()
    with pytest.raises(FileNotFoundError):
        (tmp_path / "missing" / "file").write_text("x")
    with pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        os.open(tmp_path / "there", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def test_connections_are_refused_and_named(shadow: Shadow) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        shadow.guard.begin()
        with pytest.raises(RehearsalRefused, match=r"test_guard\.py:\d+.*connects to"):
            socket.create_connection(server.getsockname())
        shadow.guard.end()
        socket.create_connection(server.getsockname()).close()


def test_processes_are_refused_and_named(shadow: Shadow) -> None:
    shadow.guard.begin()
    with pytest.raises(RehearsalRefused, match=r"test_guard\.py:\d+.*starts a process"):
        subprocess.run([sys.executable, "-c", ""], check=True)


def test_a_function_bound_before_is_refused(shadow: Shadow, tmp_path: Path) -> None:
    remove = os.remove
    (tmp_path / "file").write_text("kept")
    shadow.guard.begin()
    with pytest.raises(RehearsalRefused, match="os.remove"):
        remove(tmp_path / "file")
    shadow.guard.end()
    assert (tmp_path / "file").read_text() == "kept"


def test_afterwards_every_function_is_what_it_was(shadow: Shadow) -> None:
    watched = [(builtins, "open"), (os, "stat"), (os, "open"), (os, "mkdir"), (shutil, "rmtree")]
    before = [getattr(owner, name) for owner, name in watched]
    shadow.guard.begin()
    assert builtins.open is not before[0]
    shadow.guard.end()
    assert [getattr(owner, name) for owner, name in watched] == before


def test_directories_are_made_once_the_process_has_a_rank(shadow: Shadow, tmp_path: Path) -> None:
    shadow.guard.begin()
    os.makedirs(tmp_path / "out" / "deep", exist_ok=True)
    shadow.guard.end()
    assert not (tmp_path / "out").exists()
    assert shadow.guard.adopted() == []
    assert (tmp_path / "out" / "deep").is_dir()
    assert not shadow.scratch.exists()


def test_devices_and_byte_code_caches_stay_allowed(shadow: Shadow, tmp_path: Path) -> None:
    (tmp_path / "__pycache__").mkdir()
    shadow.guard.begin()
    with open("/dev/null", "w") as null:
        null.write("x")
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"x")
    shadow.guard.end()
    assert (tmp_path / "__pycache__" / "a.pyc").exists()
    assert shadow.told == []


def test_a_compile_cache_that_main_itself_chooses_stays_allowed(
    shadow: Shadow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redirected, half of a build would lie elsewhere: C++ compilers write past Python."""
    shadow.guard.begin()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    os.mkdir(tmp_path / "caches")
    (tmp_path / "caches" / "kernel.cpp").write_text("x")
    (tmp_path / "caches2").write_text("x")
    shadow.guard.end()
    assert (tmp_path / "caches" / "kernel.cpp").read_text() == "x"
    assert not (tmp_path / "caches2").exists()


def test_what_can_not_be_done_is_no_write(shadow: Shadow, tmp_path: Path) -> None:
    """Compilers make sure of directories that are there: nobody has to be told."""
    (tmp_path / "there").mkdir()
    shadow.guard.begin()
    os.makedirs(tmp_path / "there", exist_ok=True)
    with pytest.raises(FileExistsError):
        os.mkdir(tmp_path / "there")
    with pytest.raises(FileNotFoundError):
        os.remove(tmp_path / "not there")
    with pytest.raises(FileExistsError), open(tmp_path / "there", "x"):
        pass
    assert shadow.told == []
    assert sorted(os.listdir(tmp_path)) == ["there"]
    os.mkdir(tmp_path / "made")
    assert len(shadow.told) == 1
    assert {"made", "there"} <= set(os.listdir(tmp_path))
    shadow.guard.end()
    assert not (tmp_path / "made").exists()
