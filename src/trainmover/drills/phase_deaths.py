"""Deaths at bad moments: for each named phase, each process that can die while it is passed.

Decides who is struck and how: a process that passes the phase itself kills itself there; any other
one is killed from outside while the passer is held in the phase for a moment. What must come of it
is the same for all: the job is back with the same numbers, or it stopped with one reason.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from trainmover.drills import victims
from trainmover.drills.harness import RunningJob
from trainmover.drills.scenario import Scenario
from trainmover.errors import TransportError
from trainmover.protocol import exits
from trainmover.protocol.phases import PHASES, Kind, Phase, Process

MACHINES: Final = 4
STANDBYS: Final = 2
LEAVER: Final = "m1"
STAYER: Final = "m2"
SWITCHOVER: Final = 2
"""Number of the first switchover behind the formation."""
HOLD_S: Final = 0.4
"""How long the passer is held in the phase while another process is killed."""

LEGITIMATE_STOPS: Final = frozenset({exits.COMPLETED, exits.CANNOT_RESTORE, exits.NO_MACHINE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """One process dies while one phase of one kind of switchover is passed."""

    phase: Phase
    kind: Kind
    victim: Process

    @property
    def name(self) -> str:
        """``planned-delta_swapped-joiner``."""
        return f"{self.kind}-{self.phase.name}-{self.victim}"

    @property
    def passer(self) -> Process:
        """Who passes the phase: the victim itself where it does."""
        if self.victim in self.phase.passed_by:
            return self.victim
        return next(p for p in self.phase.passed_by if can_pass(self.kind, p))


def can_pass(kind: Kind, process: Process) -> bool:
    """A lost machine passes nothing any more: unplanned switchovers have no living leaver."""
    return not (kind == "unplanned" and process == "leaver")


def all_deaths() -> tuple[Death, ...]:
    """Every phase of each of its kinds with every process that is alive in it."""
    processes: tuple[Process, ...] = ("controller", "joiner", "leaver", "stayer")
    return tuple(
        Death(phase=phase, kind=kind, victim=victim)
        for phase in PHASES
        for kind in phase.kinds
        for victim in processes
        if can_pass(kind, victim) and any(can_pass(kind, p) for p in phase.passed_by)
    )


def draw_deaths(seed: int, count: int) -> tuple[Death, ...]:
    """`count` of all deaths, the same ones for the same seed."""
    return tuple(random.Random(seed).sample(all_deaths(), count))


def rule(death: Death, joiner: str) -> str:
    """The injection rule: kill there, or hold the passer there."""
    who = {"controller": "controller", "joiner": joiner, "leaver": LEAVER, "stayer": STAYER}
    action = "kill" if death.passer == death.victim else f"pause={HOLD_S}"
    # Forming the job passes some of these phases, too: its number is 1, the switchover's is 2.
    is_numbered = death.passer == "controller" or "planned" in death.phase.kinds
    if death.phase.name == "leaver_released":
        is_numbered = False  # the leaver never becomes a member of the new generation
    number = SWITCHOVER if is_numbered else "*"
    return f"{action}@{death.phase.name}:{who[death.passer]}:{number}"


def scenario_of(death: Death) -> Scenario:
    """The drill of one death."""
    joiner = f"m{MACHINES}"

    def act(job: RunningJob, draw: random.Random) -> None:
        job.wait_for_standby(STANDBYS)
        job.wait_for_step(4)
        if death.kind == "planned":
            # A controller that dies at once takes its answer along.
            with suppress(*((TransportError,) if death.victim == "controller" else ())):
                job.request_switchover((LEAVER,), (joiner,))
        else:
            job.kill_machine(LEAVER)
        job.wait_for(job.struck, f"{death.phase.name} is passed by {death.passer}", 30.0)
        if death.passer != death.victim:
            _kill(job, death.victim, joiner)
        job.wait_for_step(job.last_step() + 4)

    return Scenario(
        name=death.name,
        text=f"{death.victim} dies while {death.phase.text} ({death.kind})",
        act=act,
        machines=MACHINES,
        standbys=STANDBYS,
        kinds=frozenset(
            {"planned", "respawn", "standby", "reconnect", "fresh_start", "aborted", "fresh"}
        ),
        # What an operator has asked for ends with the controller that was asked, if it was not
        # carried out by then.
        must_be_told=death.kind != "planned" or death.victim != "controller",
        faults=rule(death, joiner),
        codes=LEGITIMATE_STOPS,
    )


def _kill(job: RunningJob, victim: Process, joiner: str) -> None:
    if victim == "controller":
        job.kill_controller()
        return
    machine = {"joiner": joiner, "leaver": LEAVER, "stayer": STAYER}[victim]
    for _, pid in victims.machine_file(job.directory, machine).workers:
        victims.kill_worker_group(pid)
