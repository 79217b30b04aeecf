"""What one seed means: size of the job, speed of everything, and which faults strike when.

Decides nothing while the world runs: a scenario is drawn once, completely, from the seed. Victims
are drawn when the fault strikes, from the world's own random numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LOSSES = ("kill_worker", "kill_machine", "silence_machine", "stop_worker", "leave_machine")
"""Faults that cost a process or a machine."""
OTHERS = (
    "kill_agent",
    "kill_controller",
    "crash_at_append",
    "hang_controller",
    "reset_channel",
    "cut_pair",
    "cut_link",
    "pause_worker",
)
REQUESTS = ("switch_one", "switch_two", "stop_boundary")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens from outside."""

    at_s: float
    kind: str
    lasts_s: float
    is_during_switch: bool
    """Wait until a switchover is open, then strike within it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything a seed decides."""

    seed: int
    machines: int
    workers_per_machine: int
    standbys: int
    steps: int
    step_s: float
    channel_delay_s: float
    link_delay_s: float
    append_s: float
    build_s: float
    move_s: float
    """Time for a joiner's state to travel."""
    loss: float
    """Share of control messages lost while the link stays up."""
    duplication: float
    changes_in_tail: bool
    run_out_fails: float
    script_fails_at: int
    """Step at which rank 0 raises; -1: never."""
    revive_s: float
    """After which a dead machine comes back with nothing on it; 0: never."""
    faults: tuple[Fault, ...]
    without: tuple[str, ...] = ()
    """Rules of the worker's lifecycle that are switched off (mutation check)."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.machines * self.workers_per_machine


def _faults(draw: random.Random, duration_s: float) -> tuple[Fault, ...]:
    count = draw.choice((0, 1, 1, 2, 2, 3, 3, 4, 5))
    faults = []
    for _ in range(count):
        pool = draw.choice((LOSSES, LOSSES, OTHERS, OTHERS, REQUESTS[:2]))
        kind = draw.choice(pool)
        at = draw.uniform(0.0, duration_s * 1.1)
        lasts = draw.choice((0.2, 1.0, 4.0, 9.0, 14.0, 25.0)) * draw.uniform(0.5, 1.5)
        faults.append(Fault(at, kind, lasts, draw.random() < 0.4))
    if draw.random() < 0.05:
        faults.append(Fault(draw.uniform(0.0, duration_s), "stop_boundary", 0.0, False))
    if any(fault.is_during_switch for fault in faults) and draw.random() < 0.7:
        kind = draw.choice(("switch_one", "switch_one", "switch_two", "kill_worker"))
        at = draw.uniform(0.1, duration_s * 0.6)
        faults.append(Fault(at, kind, 0.0, False))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_scenario(seed: int, *, without: tuple[str, ...] = ()) -> Scenario:
    """The scenario of `seed`, the same for ever."""
    draw = random.Random(f"scenario {seed}")
    machines = draw.choice((2, 3, 3, 4, 4))
    workers = draw.choice((1, 1, 1, 1, 2)) if machines < 4 else 1
    steps = draw.choice((4, 8, 12, 16))
    step_s = draw.choice((0.02, 0.1, 0.3))
    build_s = draw.choice((0.1, 1.0, 5.0))
    duration_s = 2 * build_s + 2.0 + steps * (step_s + 0.05)
    return Scenario(
        seed=seed,
        machines=machines,
        workers_per_machine=workers,
        standbys=draw.choice((0, 1, 1, 2, 2, 3)),
        steps=steps,
        step_s=step_s,
        channel_delay_s=draw.choice((0.0002, 0.002, 0.02)),
        link_delay_s=draw.choice((0.0005, 0.005, 0.05)),
        append_s=draw.choice((0.0, 0.002, 0.05)),
        build_s=build_s,
        move_s=draw.choice((0.01, 0.1, 1.0)),
        loss=draw.choice((0.0, 0.0, 0.01, 0.05)),
        duplication=draw.choice((0.0, 0.0, 0.02, 0.1)),
        changes_in_tail=draw.random() < 0.15,
        run_out_fails=draw.choice((0.0, 0.0, 0.0, 0.2)),
        script_fails_at=draw.randrange(steps) if draw.random() < 0.04 else -1,
        revive_s=draw.choice((0.0, 5.0, 20.0)),
        faults=_faults(draw, duration_s),
        without=without,
    )
