"""What is committed is on the medium: a file system that loses its power keeps it (P6).

An ext4 image on a loop device is shut down without flushing its journal, as a power loss would;
then it is mounted again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.checkpoint.stage import save_and_prune
from tests.process.checkpoint.staging import ROOT
from tests.unit.checkpoint.sample import local, make

from trainmover.checkpoint.reader import open_checkpoint
from trainmover.checkpoint.survey import survey
from trainmover.checkpoint.tiers import pick
from trainmover.checkpoint.writer import write_rank

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN."""
WITHOUT_FLUSH = 2

pytestmark = pytest.mark.needs_root


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=30)


def cut_power(mount: Path) -> None:
    """Nothing that is in memory only reaches the medium any more."""
    file = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(file, SHUTDOWN, WITHOUT_FLUSH.to_bytes(4, sys.byteorder))
    finally:
        os.close(file)


def story(image: Path, mount: Path) -> None:
    """Runs in a mount namespace of its own: nothing stays mounted, whatever happens."""
    run("mount", "-o", "loop", image, mount)
    root = mount / "root"
    save_and_prune(root, 10)
    save_and_prune(root, 20)
    write_rank(local(root), *make(0, 2, 30))  # begun, not committed
    cut_power(mount)
    run("umount", mount)
    run("mount", "-o", "loop", image, mount)
    committed = survey(local(root)).committed
    assert [c.manifest.step for c in committed] in ([20], [10, 20])
    assert not open_checkpoint(local(root), committed[-1].name).verify()
    chosen = pick({"durable": local(root)})
    assert chosen is not None and chosen.manifest.step == 20
    assert save_and_prune(root, 40) == []
    assert [path.name for path in root.iterdir()] == ["step-0000000040-l1-g1-r0ca441"]
    run("umount", mount)
    print("survived")


def test_power_loss(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "mkfs.ext4"))):
        pytest.skip("not shown: needs root, unshare and mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    run("mkfs.ext4", "-q", "-F", image)
    result = subprocess.run(
        ["unshare", "-m", sys.executable, "-m", "tests.process.checkpoint.test_power_loss"]
        + [str(image), str(mount)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "failed to setup loop" in result.stderr or "loop device" in result.stderr:
        pytest.skip("not shown: no loop device")
    assert result.stdout.strip() == "survived", result.stderr[-3000:]


if __name__ == "__main__":
    story(Path(sys.argv[1]), Path(sys.argv[2]))
