"""A storage that fails: named, bounded, and no earlier checkpoint is touched (B10, CK-2)."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.checkpoint.stage import OPTIONS, TENSORS, save_and_prune
from tests.process.checkpoint.staging import ROOT, Stage, can_trace
from tests.unit.checkpoint.sample import QUICK, RUN, local, make, save

from trainmover.checkpoint.cleaning import prune
from trainmover.checkpoint.commit import commit
from trainmover.checkpoint.local_store import LocalOutput, LocalStore
from trainmover.checkpoint.manifest import Authority
from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.retention import KeepLast
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.writer import write_rank
from trainmover.errors import (
    ShardMissing,
    StorageDenied,
    StorageFailed,
    StorageFull,
    StorageVanished,
)

needs_strace = pytest.mark.skipif(not can_trace(), reason="not shown: no strace to inject errors")
needs_root = pytest.mark.needs_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with step 10 committed."""
    save_and_prune(tmp_path / "root", 10)
    return tmp_path / "root"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as process:
        yield process


def committed(path: Path) -> list[int]:
    """Steps committed, each of them complete."""
    found = survey(local(path)).committed
    for item in found:
        assert not open_checkpoint(local(path), item.name).verify()
    return [item.manifest.step for item in found]


@needs_strace
@pytest.mark.parametrize("code", ["EFAULT", "ESTALE", "EIO", "EACCES"])
def test_a_rename_that_fails_once(root: Path, stage: Stage, code: str) -> None:
    """C34: repeated, and saved."""
    inject = (f"?rename,?renameat,renameat2:error={code}:when=1",)
    assert stage.save(root, 20, inject=inject) == "done"
    assert committed(root) == [20]


@needs_strace
@pytest.mark.parametrize("code", ["EFAULT", "ESTALE", "EIO", "EACCES", "EXDEV"])
def test_a_rename_that_always_fails(root: Path, stage: Stage, code: str) -> None:
    """C34: a failed save with the reason in it; never a copy in place."""
    said = stage.save(root, 20, inject=(f"?rename,?renameat,renameat2:error={code}",))
    assert code in said and "renaming" in said
    assert committed(root) == [10]
    assert save_and_prune(root, 20) == []
    assert committed(root) == [20]


@needs_strace
def test_a_rename_refused_twice(root: Path, stage: Stage) -> None:
    """C36: a reader on a share that locks open files."""
    inject = ("?rename,?renameat,renameat2:error=EACCES:when=1..2",)
    assert stage.save(root, 20, inject=inject) == "done"


@needs_strace
@pytest.mark.parametrize("call", ["fsync,fdatasync", "write", "close"])
def test_an_input_output_error_once(root: Path, stage: Stage, call: str) -> None:
    """C25: a failed fsync spoils the file, so the whole file is written again."""
    assert stage.save(root, 20, inject=(f"{call}:error=EIO:when=3",)) == "done"
    assert committed(root) == [20]


@needs_strace
def test_input_output_errors_without_end(root: Path, stage: Stage) -> None:
    """C25: the save fails by name, the next ones are tried, pruning does not stumble."""
    said = stage.save(root, 20, inject=("fsync:error=EIO",))
    assert said.startswith("StorageFailed") and "EIO" in said and str(root) in said
    assert committed(root) == [10]
    assert stage.save(root, 30) == "done"
    assert committed(root) == [30]
    assert [path.name for path in root.iterdir()] == ["step-0000000030-l1-g1-r0ca441"]


@needs_strace
def test_a_deletion_that_fails(root: Path, stage: Stage) -> None:
    """C25: what can't be pruned is told and tried again; the new one counts."""
    said = stage.save(root, 20, inject=("?rmdir:error=EIO", "?unlink,unlinkat:error=EIO:when=20+"))
    assert said.startswith("pruning:")
    assert committed(root)[-1] == 20
    assert stage.save(root, 30) == "done"
    assert [path.name for path in root.iterdir()] == ["step-0000000030-l1-g1-r0ca441"]


@needs_strace
@pytest.mark.parametrize("call", ["?open,openat", "write", "fsync"])
def test_a_full_disk_by_injection(root: Path, stage: Stage, call: str) -> None:
    """C18: keep_last = 1 and three saves that fail: step 10 survives them."""
    for step in (20, 30, 40):
        said = stage.save(root, step, inject=(f"{call}:error=ENOSPC:when=9",))
        assert said.startswith("StorageFull"), said
        assert committed(root) == [10]
    assert stage.save(root, 50) == "done"
    assert [path.name for path in root.iterdir()] == ["step-0000000050-l1-g1-r0ca441"]


def test_a_file_size_limit(root: Path, stage: Stage) -> None:
    """A real refusal of the kernel, without root: RLIMIT_FSIZE."""
    said = stage.save(root, 20, file_limit=200)
    assert said.startswith("StorageFull") and "EFBIG" in said
    assert committed(root) == [10]


FULL_DISK = """
import sys
from pathlib import Path
from tests.process.checkpoint.test_storage_faults import committed, fill_up
fill_up(Path(sys.argv[1]))
"""


def fill_up(path: Path) -> None:
    """Save until the disk is full; the last good one stays whole, and one more fits afterwards."""
    last = 0
    for step in range(10, 10000, 10):
        try:
            save(LocalStore(path, retries=QUICK), step, options=OPTIONS, tensors=TENSORS)
        except StorageFull:
            break
        last = step
    assert 10 < last < 10000
    assert committed(path)[-1] == last
    assert prune(local(path), KeepLast(1), run_id=RUN).deleted
    save_and_prune(path, last + 20)
    assert committed(path) == [last + 20]
    print("survived")


@needs_root
@pytest.mark.parametrize("options", ["size=6m", "size=64m,nr_inodes=60"], ids=["bytes", "inodes"])
def test_a_small_disk(tmp_path: Path, options: str) -> None:
    """C18, F3: a tmpfs that runs out of bytes, and one that runs out of inodes."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("not shown: mounting a small disk needs root")
    script = f'mount -t tmpfs -o {options} t {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, FULL_DISK],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.stdout.strip() == "survived", result.stderr[-2000:]


def test_the_space_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is begun that can't fit: the message has both numbers."""
    state, image = make(0, 1, 10)
    needed = shutil.disk_usage(tmp_path).total + 1  # what is free may change meanwhile
    monkeypatch.setattr("trainmover.checkpoint.writer.MARGIN_BYTES", needed)
    with pytest.raises(StorageFull, match=r"has \d+ bytes free, rank 0 needs \d+"):
        write_rank(local(tmp_path / "root"), state, image)
    assert not (tmp_path / "root").exists()


def test_no_permission(root: Path, stage: Stage) -> None:
    """Named, at once, with what to do."""
    root.chmod(0o555)
    order = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
    _let_through(root)
    said = stage.save(root, 20, **order)
    assert said.startswith("StorageDenied") and "write access" in said
    root.chmod(0o755)
    assert committed(root) == [10]


def _let_through(path: Path) -> None:
    """pytest's own directories are closed to other users."""
    for parent in path.parents:
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)


@needs_root
def test_modes_follow_the_umask(tmp_path: Path, stage: Stage) -> None:
    """C38: a colleague of the group goes on; with umask 0077 nobody else reads."""
    if os.geteuid() != 0:
        pytest.skip("not shown: playing two users needs root")
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, 2001, 2100)
    root.chmod(0o2770)
    _let_through(root)
    mine = {"user": 2001, "group": 2100, "umask": 0o027}
    assert stage.save(root, 10, **mine) == "done"
    folder = root / "step-0000000010-l1-g1-r0ca441"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2750
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        assert file.stat().st_gid == 2100
    shutil.rmtree(folder)
    both = {"group": 2100, "umask": 0o007}
    assert stage.save(root, 20, user=2001, **both) == "done"
    assert stage.save(root, 30, user=2002, **both) == "done"  # prunes what 2001 has written
    assert committed(root) == [30]
    assert stage.save(root, 40, user=2002, group=2100, umask=0o077) == "done"
    for file in (root / "step-0000000040-l1-g1-r0ca441").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    """Between the shards and the commit somebody removes everything."""
    store = local(tmp_path / "root")
    state, image = make(0, 1, 10)
    record = write_rank(store, state, image)
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(ShardMissing, match="nothing was committed"):
        commit(store, [record], Authority(term=1, generation=1))


class VanishingStore(LocalStore):
    """Its directory goes away when the second file is created."""

    count = 0

    def create(self, path: str) -> LocalOutput:
        self.count += 1
        if self.count == 2:
            shutil.rmtree(self.root)
        return super().create(path)


def test_a_directory_that_vanishes_while_writing(tmp_path: Path) -> None:
    state, image = make(0, 1, 10)
    with pytest.raises(StorageVanished, match="the directory has gone"):
        write_rank(VanishingStore(tmp_path / "root", retries=QUICK), state, image)


@needs_strace
def test_a_slow_fsync(root: Path, stage: Stage) -> None:
    """F2: an fsync that takes a while delays the save and harms nothing."""
    inject = ("fsync:delay_exit=300000:when=2",)
    assert stage.save(root, 20, inject=inject) == "done"
    assert committed(root) == [20]


def test_denied_is_told_from_failed() -> None:
    from trainmover.checkpoint.failures import named

    assert isinstance(named(PermissionError(13, "x"), "writing", "p"), StorageDenied)
    assert isinstance(named(OSError(30, "x"), "writing", "p"), StorageDenied)
    assert isinstance(named(OSError(122, "x"), "writing", "p"), StorageFull)
    assert type(named(OSError(5, "x"), "writing", "p")) is StorageFailed
