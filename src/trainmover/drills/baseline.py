"""What a lost or departing machine costs without trainmover: torchrun and a checkpoint, measured.

Decides how the same training job is run, killed and restarted under plain torchrun, and how its
event files become samples. Does not decide what is compared with them, and trains nothing itself:
the script does, in processes of its own (see `examples/baselines/torchrun_dcp.py`).

All times are CLOCK_MONOTONIC of this host, which every process of the run shares.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from trainmover.errors import BaselineFailed, ConfigError

POLL_S = 0.005
MARK = "TRAINMOVER_BASELINE_MARK"
PHASES = ("started", "imported", "connected", "built", "restored")

Agents = Literal["per_machine", "single"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """One run of the job under plain torchrun."""

    script: Path
    """Training script that writes the event files, `examples/baselines/torchrun_dcp.py`."""
    folder: Path
    """Empty or missing folder for checkpoints, events, compile caches and logs."""
    script_arguments: tuple[str, ...] = ()
    """Size of the model and so on; handed to the script as they are."""
    ranks: int = 4
    """Played machines, one rank each."""
    agents: Agents = "per_machine"
    """`per_machine`: a torchrun agent for each rank; the fault kills agent and worker, and the
    agent is started again at once. `single`: one agent for all; the fault kills the worker."""
    steps: int = 32
    """Updates in total; at least the steps after the fault that are needed to see it recover."""
    fault_step: int = 26
    """The fault strikes once the victim has reported this step; planned: the last step before the
    move. With a checkpoint every 20 steps the default redoes 6."""
    hold_at: int | None = None
    """Step in front of which the job waits for its fault, so that it does not end before; None: the
    last one. Unplanned only."""
    fault_rank: int = 2
    """Who is killed. Not 0 with one agent per machine: its agent hosts the rendezvous store."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    is_compiled: bool = False
    """Run under torch.compile, with one compile cache per played machine."""
    replaced_cache_is_empty: bool = True
    """Compiled only: the replaced machine starts without a cache, as a fresh machine would."""
    limit_s: float = 300.0
    """The whole run; when it is over everything is killed and the run has failed."""

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise ConfigError(f"baseline script {self.script} is not there; give a clone's path")
        if not 0 <= self.fault_rank < self.ranks:
            raise ConfigError(f"fault_rank {self.fault_rank} is not one of {self.ranks} ranks")
        if self.agents == "per_machine" and self.fault_rank == 0:
            raise ConfigError("fault_rank 0 hosts the rendezvous store; choose another rank")
        if self.fault_step + 2 > self.steps:
            raise ConfigError(f"steps {self.steps} ends before a fault at {self.fault_step} shows")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line that the script wrote: `rank` did `name` in process `pid`."""

    name: str
    rank: int
    pid: int
    agent: int
    time_s: float
    step: int
    loss: str


def run_unplanned_baseline(config: BaselineConfig) -> dict[str, Any]:
    """Train, SIGKILL one machine at `fault_step`, let torchrun restart the job; the samples.

    Blocks: until the job has finished, at most `limit_s`. Nothing it started is left.

    Returns:
        See `samples`; `kind` is "unplanned".
    Raises:
        BaselineFailed: The job did not come back in time; carries the end of its log.
    """
    killed = config.folder / "killed"
    hold_at = config.steps - 1 if config.hold_at is None else config.hold_at
    hold = ("--wait-at", str(hold_at), "--wait-for", str(killed))
    with Run(replace(config, script_arguments=(*config.script_arguments, *hold))) as run:
        for index in range(config.ranks if config.agents == "per_machine" else 1):
            run.start_agent(index, "first")
        victim = run.wait_for(lambda events: reported(events, config))
        killed_s = time.monotonic()
        run.kill_machine(victim)
        killed.touch()
        run.wait_until_done()
        return samples(config, "unplanned", read_events(config.folder), killed_s)


def run_planned_baseline(config: BaselineConfig) -> dict[str, Any]:
    """Train, save after `fault_step` and exit 0, start the job again at once; the samples.

    Blocks: until the job has finished, at most `limit_s`. Nothing it started is left.

    Returns:
        See `samples`; `kind` is "planned".
    Raises:
        BaselineFailed: A part of the run failed or took too long; carries the end of its log.
    """
    count = config.ranks if config.agents == "per_machine" else 1
    stop = ("--stop-before", str(config.fault_step + 1))
    with Run(replace(config, script_arguments=(*config.script_arguments, *stop))) as run:
        for index in range(count):
            run.start_agent(index, "first")
        run.wait_until_done()
        stopped_s = time.monotonic()
        run.new_rendezvous()
        for index in range(count):
            is_replaced = config.agents == "per_machine" and index == config.fault_rank
            run.start_agent(index, "second", is_replaced=is_replaced)
        run.wait_until_done()
        return samples(config, "planned", read_events(config.folder), stopped_s)


def reported(events: Sequence[Event], config: BaselineConfig) -> Event | None:
    """The victim's report of `fault_step`, once it is there."""
    for event in events:
        if (event.name, event.rank, event.step) == ("step", config.fault_rank, config.fault_step):
            return event
    return None


# -------------------------------------------------------------------------------------- processes


class Run:
    """The processes of one run. Leaving the block kills whatever is still there."""

    def __init__(self, config: BaselineConfig) -> None:
        self.config = config
        self.mark = uuid.uuid4().hex
        self.deadline_s = time.monotonic() + config.limit_s
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        config.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in marked(self.mark):
            kill(process)
        for agent in self.agents.values():
            agent.wait(timeout=10)

    def new_rendezvous(self) -> None:
        """A fresh port: the next torchrun is a job of its own, as a restarted one is."""
        self.port = free_port()

    def start_agent(self, index: int, life: str, *, is_replaced: bool = False) -> None:
        """Start the torchrun agent of machine `index`, or the only one."""
        config = self.config
        is_single = config.agents == "single"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts=3"),
            f"--nnodes={1 if is_single else config.ranks}",
            f"--nproc-per-node={config.ranks if is_single else 1}",
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"),
            # Machine 0 holds the store, whoever starts first: the victim must not.
            f"--rdzv-conf=is_host={'true' if index == 0 else 'false'}",
            *(f"--rdzv-id={self.mark}", "--monitor-interval=0.1", str(config.script)),
            *("--folder", str(config.folder), "--every", str(config.checkpoint_every)),
            *("--steps", str(config.steps), *config.script_arguments),
        ]
        environment = os.environ | {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            # torch 2.13: without it restarted ranks read the dead generation's addresses.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if config.is_compiled:
            command.append("--compile")
            self._give_caches(index, life if is_replaced else "first", command, environment)
        log = (config.folder / f"agent-{index}.log").open("ab")
        self.agents[index] = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        log.close()

    def _give_caches(
        self, index: int, life: str, command: list[str], environment: dict[str, str]
    ) -> None:
        """One compile cache per machine; by rank in the script where one agent plays them all."""
        caches = self.config.folder / "caches"
        is_cold = self.config.replaced_cache_is_empty
        if self.config.agents == "single":
            cold = ["--cold-rank", str(self.config.fault_rank)] if is_cold else []
            command += ["--cache", str(caches), *cold]
        else:
            name = f"machine-{index}-{life}" if is_cold else f"machine-{index}"
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(caches / name)

    def kill_machine(self, victim: Event) -> None:
        """SIGKILL the victim's machine and, where it has an agent of its own, start that again."""
        if self.config.agents == "single":
            os.kill(victim.pid, signal.SIGKILL)
            return
        index = next(i for i, agent in self.agents.items() if agent.pid == victim.agent)
        agent = psutil.Process(victim.agent)
        for process in [agent, *agent.children(recursive=True)]:
            kill(process)
        self.agents[index].wait(timeout=10)
        self.start_agent(index, "second", is_replaced=True)

    def wait_for(self, find: Callable[[Sequence[Event]], Event | None]) -> Event:
        """The event that `find` finds; the run fails if the job ends or the limit is reached."""
        while True:
            event = find(read_events(self.config.folder))
            if event is not None:
                return event
            self._check(self.agents.values())
            time.sleep(POLL_S)

    def wait_until_done(self) -> None:
        """Until every agent has exited with 0."""
        while any(agent.poll() is None for agent in self.agents.values()):
            self._check(self.agents.values())
            time.sleep(POLL_S)
        self._check(self.agents.values())

    def _check(self, agents: Iterable[subprocess.Popen[bytes]]) -> None:
        codes = [agent.poll() for agent in agents]
        if any(codes):
            raise BaselineFailed(f"torchrun ended with {codes}; {self._log_end()}")
        if time.monotonic() > self.deadline_s:
            raise BaselineFailed(f"not done after {self.config.limit_s} s; {self._log_end()}")

    def _log_end(self) -> str:
        """The last errors in the agents' logs; torchrun's own summary names no cause."""
        logs = sorted(self.config.folder.glob("agent-*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        errors = [line.strip() for line in lines if "Error: " in line] or lines
        return f"its logs in {self.config.folder} end with: " + " | ".join(errors[-3:])


def marked(mark: str) -> list[psutil.Process]:
    """Every process of a run, those included whose agent is dead."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # ended while we looked, or another user's
    return found


def kill(process: psutil.Process) -> None:
    """SIGKILL; that it is gone already is as good."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def free_port() -> int:
    """A port that is free now; torchrun binds it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---------------------------------------------------------------------------------------- samples


def read_events(folder: Path) -> list[Event]:
    """All complete lines of all event files, by time."""
    events = []
    for file in sorted((folder / "events").glob("*.jsonl")):
        text = file.read_text(encoding="utf-8")
        for line in text[: text.rfind("\n") + 1].splitlines():
            entry = json.loads(line)
            events.append(
                Event(
                    name=entry["event"],
                    rank=entry["rank"],
                    pid=entry["pid"],
                    agent=entry["agent"],
                    time_s=entry["time_s"],
                    step=entry.get("step", -1),
                    loss=entry.get("loss", ""),
                )
            )
    return sorted(events, key=lambda event: event.time_s)


def finished_by_all(events: Iterable[Event], ranks: int) -> dict[int, float]:
    """Step -> when the last of all ranks finished it; steps that a rank lacks are left out."""
    times: dict[int, dict[int, float]] = {}
    for event in events:
        if event.name == "step":
            times.setdefault(event.step, {})[event.rank] = event.time_s
    return {step: max(by.values()) for step, by in sorted(times.items()) if len(by) == ranks}


def samples(
    config: BaselineConfig, kind: str, events: Sequence[Event], fault_s: float
) -> dict[str, Any]:
    """Figures of one run, with the raw times they come from.

    Returns:
        `downtime_s`: from the last step that all ranks finished before the fault to the first step
        that all finished after it, less one median step. `to_new_s`: the same to the first step not
        done before, so with the redone ones, less one median step. `redone`: how many those are.
        `step_s`: median step before the fault. `phases_s`: seconds from the fault until the last
        rank of the restarted job reached each phase. `before`, `after`: step -> time of `finished`.
        `losses`: step -> loss of the global batch as a hex float, the last one written.
    Raises:
        BaselineFailed: The events don't show a job that trained before and after the fault.
    """
    old = {event.pid for event in events if event.time_s <= fault_s}
    before = finished_by_all((e for e in events if e.pid in old), config.ranks)
    later = [event for event in events if event.pid not in old]
    after = finished_by_all(later, config.ranks)
    if len(before) < 3 or not after or max(after) <= max(before):
        raise BaselineFailed(f"steps {list(before)} before and {list(after)} after the fault")
    marks = list(before.values())
    # The first step imports, connects and compiles; it is no step.
    step_s = statistics.median(b - a for a, b in itertools.pairwise(marks[1:]))
    last_step, last_s = max(before), max(before.values())
    new_s = min(time_s for step, time_s in after.items() if step > last_step)
    reached = {
        phase: max((e.time_s for e in later if e.name == phase), default=fault_s) - fault_s
        for phase in PHASES
    }
    return {
        "kind": kind,
        "mode": "compile" if config.is_compiled else "eager",
        "agents": config.agents,
        "ranks": config.ranks,
        "downtime_s": min(after.values()) - last_s - step_s,
        "to_new_s": new_s - last_s - step_s,
        "redone": last_step + 1 - min(after),
        "step_s": step_s,
        "phases_s": reached,
        "before": {str(step): time_s - fault_s for step, time_s in before.items()},
        "after": {str(step): time_s - fault_s for step, time_s in after.items()},
        "losses": {str(e.step): e.loss for e in events if e.name == "step"},
    }
