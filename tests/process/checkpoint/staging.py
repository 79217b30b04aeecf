"""Drives `stage.py`: one save at a time, with a fault put into it.

Decides how a fault is injected: strace attached to the child that saves, or a preloaded library
that kills. Nothing here waits without a limit.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
LIMIT_S = 30.0
CLASSES = (
    "?mkdir,?mkdirat",
    "?open,openat",
    "write,?pwrite64",
    "fsync,fdatasync",
    "?rename,?renameat,renameat2",
    "?unlink,unlinkat",
    "?rmdir",
    "close",
)
"""Calls that can change a file system, by strace's names; strace counts each call by itself."""


WAITING = "sched_yield"
"""What a child that waits calls again and again, see `stage.wait_for`."""


class Stage:
    """A stage process; `save` makes one child save."""

    def __init__(self, preload: Path | None = None) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        if preload is not None:
            environment["LD_PRELOAD"] = str(preload)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.checkpoint.stage"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def save(self, root: Path, step: int, *, inject: tuple[str, ...] = (), **order: Any) -> str:
        """Outcome of one save below `root`: `done`, `killed`, or the error's name and message.

        Args:
            root: Directory of the checkpoints.
            step: What to save.
            inject: strace's `inject=` expressions.
            order: Conditions, see `stage.child`.
        """
        line = {"root": str(root), "step": step, "is_inline": bool(inject), **order}
        self._tell(json.dumps(line))
        pid = int(self._hear())
        tracer = _attach(pid, inject) if inject else None
        self._tell("go")
        outcome = str(json.loads(self._hear()))
        if tracer is not None:
            tracer.wait(timeout=LIMIT_S)
        return outcome

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], LIMIT_S)
        assert ready, f"the stage said nothing for {LIMIT_S} s"
        return self._process.stdout.readline()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        self._process.stdout.close()


def _attach(pid: int, inject: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """strace on `pid`, which sees its calls on return: being attached is not enough."""
    with tempfile.NamedTemporaryFile("r") as seen:
        tracer = subprocess.Popen(
            ["strace", "-qqq", "-o", seen.name, "-p", str(pid)]
            + ["-e", f"trace={','.join((*CLASSES, WAITING))}"]
            + [word for one in inject for word in ("-e", f"inject={one}")],
        )
        eventually(
            lambda: WAITING in Path(seen.name).read_text(),
            f"strace sees the calls of {pid}",
            timeout_s=LIMIT_S,
        )
    return tracer


def can_trace() -> bool:
    """Whether strace is there and may attach to a process that isn't its child."""
    if shutil.which("strace") is None:
        return False
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0"


def build_killer(folder: Path) -> Path | None:
    """The library of `sweep.c`, compiled; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "sweep.so"
    source = Path(__file__).with_name("sweep.c")
    command = [compiler, "-std=gnu11", "-O1", "-w", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(source), "-ldl"], check=True, timeout=60)
    return library
