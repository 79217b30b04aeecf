"""Named drills: what is done to a running job, and what must come of it.

Decides faults, their moments (always an event, never a time) and the kinds of incident they must
lead to. Victims are drawn from the seed. Does not decide whether numbers are right (`compare`) or
the journal is (the checks room); `runner` asks them.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trainmover.drills import victims
from trainmover.drills.harness import RunningJob

Act = Callable[[RunningJob, random.Random], None]

EARLY_STEP: Final = 4
"""First faults strike behind this step: DDP has rebuilt its buckets by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One drill."""

    name: str
    text: str
    act: Act
    machines: int = 4
    standbys: int = 1
    kinds: frozenset[str]
    """Kinds of incident that may occur; empty: none at all."""
    must_be_told: bool = True
    """Whether at least one of them must."""
    faults: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    codes: frozenset[int] = frozenset({0})
    """Exit codes that are right; with 0 the numbers must be identical."""


def _ready(job: RunningJob, standbys: int = 1) -> None:
    job.wait_for_standby(standbys)
    job.wait_for_step(EARLY_STEP)


def _is_back(job: RunningJob, incidents: int = 1) -> None:
    job.wait_for_incidents(incidents)


def _rank(job: RunningJob, draw: random.Random) -> int:
    return draw.randrange(job.request.machines * job.request.workers_per_machine)


def kill_one_worker(job: RunningJob, draw: random.Random) -> None:
    """The process alone: its loader workers live, its agent sees it."""
    _ready(job)
    job.kill_worker(_rank(job, draw))
    _is_back(job)


def kill_one_machine(job: RunningJob, draw: random.Random) -> None:
    """Agent, nursery and workers at once."""
    _ready(job)
    job.kill_machine(job.member(_rank(job, draw)).machine)
    _is_back(job)


def kill_two_machines(job: RunningJob, draw: random.Random) -> None:
    """Two at once, with two standbys."""
    _ready(job, 2)
    first, second = draw.sample(range(job.request.machines), 2)
    job.kill_machine(job.member(first).machine, job.member(second).machine)
    _is_back(job)


def drain_one_machine(job: RunningJob, draw: random.Random) -> None:
    """A planned switchover."""
    _ready(job)
    job.switchover((job.member(_rank(job, draw)).machine,))
    _is_back(job)


def drain_two_machines(job: RunningJob, draw: random.Random) -> None:
    """Two of four in one planned switchover."""
    _ready(job, 2)
    ranks = sorted(draw.sample(range(job.request.machines), 2))
    job.switchover(tuple(job.member(rank).machine for rank in ranks))
    _is_back(job)


def back_to_back(job: RunningJob, draw: random.Random) -> None:
    """A second planned switchover as soon as the first is over."""
    _ready(job, 2)
    first, second = draw.sample(range(job.request.machines), 2)
    job.switchover((job.member(first).machine,))
    job.switchover((job.member(second).machine,))
    _is_back(job, 2)


def return_as_standby(job: RunningJob, draw: random.Random) -> None:
    """The machine that left comes back as standby and takes over another one's rank."""
    _ready(job)
    first, second = draw.sample(range(job.request.machines), 2)
    left = job.member(first).machine
    job.switchover((left,))
    job.wait_for(lambda: left in job.ready_standbys(), f"{left} is back as standby", 60.0)
    job.switchover((job.member(second).machine,), (left,))
    _is_back(job, 2)


def drain_then_kill(job: RunningJob, draw: random.Random) -> None:
    """What the demo does: one leaves and returns, another one dies."""
    _ready(job)
    first, second = draw.sample(range(job.request.machines), 2)
    left = job.member(first).machine
    job.switchover((left,))
    job.wait_for(lambda: left in job.ready_standbys(), f"{left} is back as standby", 60.0)
    job.kill_machine(job.member(second).machine)
    _is_back(job, 2)


def stop_worker(job: RunningJob, draw: random.Random) -> None:
    """SIGSTOP: the process is there and does nothing."""
    _ready(job)
    pid = job.stop_worker(_rank(job, draw))
    _is_back(job)
    # If it was replaced it is dead by now; if not, it must be able to go on.
    victims.send(pid, signal.SIGCONT)


def reset_connection(job: RunningJob, draw: random.Random) -> None:
    """The connections between two neighbours are reset; nobody dies."""
    _ready(job)
    first = _rank(job, draw)
    second = (first + 1) % (job.request.machines * job.request.workers_per_machine)
    job.wait_for(lambda: job.reset_connection(first, second), "a connection to reset", 10.0)
    _is_back(job)


def kill_agent(job: RunningJob, draw: random.Random) -> None:
    """The agent alone: its workers go on and are adopted by the next one."""
    _ready(job)
    machine = job.member(_rank(job, draw)).machine
    before = job.kill_agent(machine)
    job.wait_for(
        lambda: victims.machine_file(job.directory, machine).agent_pid != before,
        f"a new agent for {machine}",
        30.0,
    )
    job.wait_for_step(job.last_step() + 3)


def kill_controller(job: RunningJob, draw: random.Random) -> None:
    """Training goes on without it; the next one reads the journal."""
    _ready(job)
    before = job.kill_controller()
    job.wait_for(
        lambda: job.status() is not None and job.controller_pid() != before,
        "the controller is back",
        30.0,
    )
    job.wait_for_standby()
    job.switchover((job.member(_rank(job, draw)).machine,))
    _is_back(job)


SCENARIOS: Final[tuple[Scenario, ...]] = tuple(
    Scenario(
        name=act.__name__,
        text=(act.__doc__ or "").strip(),
        act=act,
        standbys=standbys,
        kinds=frozenset(kinds),
    )
    for act, standbys, kinds in (
        (kill_one_worker, 1, ("respawn",)),
        (kill_one_machine, 1, ("standby",)),
        (kill_two_machines, 2, ("standby",)),
        (drain_one_machine, 1, ("planned",)),
        (drain_two_machines, 2, ("planned",)),
        (back_to_back, 2, ("planned",)),
        (return_as_standby, 1, ("planned",)),
        (drain_then_kill, 1, ("planned", "standby")),
        (stop_worker, 1, ("respawn", "standby", "reconnect")),
        (reset_connection, 1, ("reconnect",)),
        (kill_agent, 1, ()),
        (kill_controller, 1, ("planned",)),
    )
)


def scenario_named(name: str) -> Scenario | None:
    """The scenario called `name`."""
    return next((scenario for scenario in SCENARIOS if scenario.name == name), None)
