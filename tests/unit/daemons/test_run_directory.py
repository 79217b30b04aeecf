"""Run directories: names, process lives, short socket paths, which job is meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainmover.daemons.run_directory import (
    BASE_VARIABLE,
    PREFIX,
    SHARED_MEMORY,
    ControllerFile,
    JobFile,
    RunDirectory,
    check_job_name,
    find_job,
    is_alive,
    read_struct,
    sweep_runtime,
    write_struct,
)
from trainmover.edges import probes
from trainmover.errors import ConfigError


def make(base: Path, name: str, pid: int) -> None:
    (base / name).mkdir(parents=True)
    job = JobFile(
        job=name,
        run_id="r",
        script="s",
        supervisor_pid=pid,
        supervisor_start=0,
        started_wall_s=0.0,
    )
    write_struct(base / name / "job.json", job)


def test_socket_paths_are_short_however_long_the_directory_is(tmp_path: Path) -> None:
    deep = RunDirectory(tmp_path / ("x" * 200))
    assert len(str(deep.nursery_socket("machine-with-a-long-name-0001"))) < 100


def test_two_directories_do_not_share_sockets(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "a").runtime != RunDirectory(tmp_path / "b").runtime


def test_structs_come_back_and_absent_ones_are_none(tmp_path: Path) -> None:
    value = ControllerFile(host="h", port=1, pid=2, term=3)
    write_struct(tmp_path / "f.json", value)
    assert read_struct(tmp_path / "f.json", ControllerFile) == value
    assert read_struct(tmp_path / "g.json", ControllerFile) is None
    (tmp_path / "f.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        read_struct(tmp_path / "f.json", ControllerFile)


def test_a_process_life_is_named_by_pid_and_start() -> None:
    me = os.getpid()
    assert is_alive(me, probes.start_time(me))
    assert not is_alive(me, probes.start_time(me) + 1)
    assert not is_alive(0, 0)


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "x" * 65])
def test_names_that_can_not_be_directories_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_job_name(name)


def test_the_only_running_job_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BASE_VARIABLE, str(tmp_path))
    make(tmp_path, "dead", 2**22 + 1)
    make(tmp_path, "alive", os.getpid())
    assert find_job(None, None).path.name == "alive"
    assert find_job("dead", None).path.name == "dead"
    make(tmp_path, "other", os.getpid())
    with pytest.raises(ConfigError, match=r"2 jobs are running \(alive, other\)"):
        find_job(None, None)
    with pytest.raises(ConfigError, match="no job 'x'.*alive, other"):
        find_job("x", None)


HOLDER = """
import sys
from pathlib import Path
from trainmover.daemons.run_directory import mark_owner
mark_owner(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_what_a_live_job_owns_is_swept_by_nobody_else() -> None:
    """Told by a lock, not by a process number: that means nothing in another container."""
    runtime = SHARED_MEMORY / f"{PREFIX}-{os.getuid()}-test{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(runtime)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            sweep_runtime()
            assert runtime.exists()
        finally:
            holder.kill()
    sweep_runtime()
    assert not runtime.exists()
