"""The toy on several hosts, played here: controller and agents by hand, each with its own disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.holding import go_mark, held_mark
from tests.waiting import eventually
from trainmover.checkpoint.store import open_store
from trainmover.checkpoint.survey import Committed, survey
from trainmover.daemons.run_directory import ControllerFile, RunDirectory, read_struct
from trainmover.edges import probes
from trainmover.edges.faults import VARIABLE
from trainmover.edges.seal import new_token

SCRIPT = Path(__file__).with_name("toy.py")


class Hosts:
    """One life of the job; leaving the block kills what is still there, as a power cut would."""

    def __init__(
        self,
        folder: Path,
        root: Path,
        disks: dict[str, Path],
        *,
        steps: int,
        every: int,
        faults: str = "",
    ) -> None:
        """
        Args:
            folder: Of this life.
            root: Has the trace and the storage of all, of all lives.
            disks: Each machine's own one.
            steps: Of the job.
            every: Steps between checkpoints.
            faults: What is to happen where, see `edges.faults`; an agent started again has none.
        """
        self.folder = folder
        self.root = root
        self.disks = disks
        self.steps = steps
        self.every = every
        self.held: tuple[int, ...] = ()
        self.token = new_token()
        self._faults = faults
        self._words: dict[str, tuple[str, ...]] = {}
        self.port = 0
        self.shared = f"checkpoint.directory={root / 'shared'}"
        self.outputs: dict[str, Path] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def held_behind(self, *steps: int) -> Hosts:
        """All ranks will wait behind these steps, see `let_go`."""
        self.held = steps
        return self

    def __enter__(self) -> Hosts:
        try:
            self._start_all()
        except BaseException:
            self.kill()
            raise
        return self

    def _start_all(self) -> None:
        words = ("--machines", str(len(self.disks)))
        rules = (
            self.shared,
            "checkpoint.local_directory=/nowhere/else",
            f"checkpoint.cadence=every {self.every} steps",
            "snapshot.cadence=never",
            "checkpoint.parallel_machines_share=1.0",
            # As where one command starts them all: sums are split alike.
            f"worker.threads={probes.default_threads(len(self.disks))}",
        )
        script = (str(SCRIPT), "--out", str(self.root / "out"), "--steps", str(self.steps))
        pace = ("--pace", "0.1", "--stop-at", *map(str, self.held))
        self._start("controller", *words, *_sets(*rules), *script, *pace)
        self.port = eventually(
            lambda: self._found_port() or self._check(), "a controller", timeout_s=60
        )
        for machine, disk in self.disks.items():
            self.join(machine, disk)

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _start(self, command: str, *words: str, name: str = "controller") -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._words[name] = words
        self.outputs[name] = self.folder / f"{name}.out"
        where = ("--run-dir", str(self.folder / name))
        faults = {VARIABLE: self._faults} if self._faults else {}
        with self.outputs[name].open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "trainmover.cli", command, *where, *words],
                env={**os.environ, "TRAINMOVER_TOKEN": self.token, **faults},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _found_port(self) -> int:
        found = read_struct(self.folder / "controller" / "controller.json", ControllerFile)
        return 0 if found is None else found.port

    def let_go(self, step: int) -> None:
        """Whoever waits behind `step` goes on, in later lives too."""
        go_mark(self.root / "out", step).touch()

    def wait_until_held(self, step: int) -> None:
        """Until all ranks wait behind `step`."""
        marks = [held_mark(self.root / "out", step, rank) for rank in range(len(self.disks))]
        eventually(lambda: all(map(Path.exists, marks)) or self._check(), "they hold", timeout_s=90)

    def start_again(self, machine: str) -> None:
        """Its agent alone, as whatever watches over it on its host would."""
        self.processes[machine].kill()
        self.processes[machine].wait()
        self._faults = ""
        self._start("agent", *self._words[machine], name=machine)

    def join(self, machine: str, disk: Path, *, name: str = "") -> None:
        """Switch a machine on; `name` is that of its process, where it is not the first one."""
        own = _sets(self.shared, f"checkpoint.local_directory={disk}")
        target = ("--controller", f"127.0.0.1:{self.port}", "--machine", machine)
        self._start("agent", *target, *own, name=name or machine)

    def lose(self, name: str) -> None:
        """A machine goes with everything on it but its disk."""
        _kill_tree(self.processes[name])

    def on_all_disks(self) -> list[str]:
        """Checkpoints that every machine has its part of, oldest first."""
        seen = [
            [one.name for folder in disk.glob("*") for one in committed(folder)]
            for disk in self.disks.values()
        ]
        return [name for name in seen[0] if all(name in other for other in seen)]

    def wait_for_disks(self, step: int) -> str:
        """Until a checkpoint of `step` or later is on all disks; the newest one's name."""

        def newest() -> str:
            names = [name for name in self.on_all_disks() if _step(name) >= step]
            return names[-1] if names else ""

        eventually(lambda: bool(newest()) or self._check(), f"step {step} on disks", timeout_s=60)
        return newest()

    def _check(self) -> bool:
        for name, process in self.processes.items():
            assert process.poll() is None, (name, self.text(name))
        return False

    def text(self, name: str = "controller") -> str:
        """What a process and its journal's console have said."""
        console = self.folder / name / "console.jsonl"
        return self.outputs[name].read_text() + (console.read_text() if console.exists() else "")

    def end(self, timeout_s: float = 120.0) -> dict[str, int]:
        """Exit codes, once all have ended by themselves."""
        return {name: process.wait(timeout_s) for name, process in self.processes.items()}

    def kill(self) -> None:
        """Everything at one stroke: controller, agents, what they have started."""
        for process in self.processes.values():
            _kill_tree(process)
        for name in self.processes:
            RunDirectory(self.folder / name).clear_runtime()


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    process.kill()
    for child in tree:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def _sets(*assignments: str) -> tuple[str, ...]:
    return tuple(word for one in assignments for word in ("--set", one))


def committed(place: Path) -> list[Committed]:
    """What counts in one place, oldest first."""
    return list(survey(open_store(str(place))).committed)


def _step(name: str) -> int:
    return int(name.split("-")[1])
