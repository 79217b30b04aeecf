"""What one seed means: size of the job, speed of everything, and which faults strike when.

Decides nothing while the world runs: a scenario is drawn once, completely, from the seed. Victims
are drawn when the fault strikes, from the world's own random numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LOSSES = (
    "kill_worker",
    "kill_machine",
    "silence_machine",
    "freeze_machine",
    "stop_worker",
    "leave_machine",
)
"""Faults that cost a process or a machine."""
OTHERS = (
    "kill_agent",
    "kill_controller",
    "crash_at_append",
    "hang_controller",
    "second_controller",
    "reset_channel",
    "cut_pair",
    "cut_link",
    "pause_worker",
)
REQUESTS = ("switch_one", "switch_two")
AIMS = ("ready", "gate", "tail", "boundary", "switch", "cut_over", "decision", "frozen")
"""Moments a fault can wait for, see `World.moment`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that happens from outside."""

    at_s: float
    is_early: bool
    """`at_s` counts from power-on instead of from the first step."""
    kind: str
    lasts_s: float
    aim: str
    """Moment to wait for then, and to strike within; empty: at once."""


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
    count = draw.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6))
    faults = [_fault(draw, duration_s) for _ in range(count)]
    if any(fault.aim in ("switch", "cut_over", "decision") for fault in faults):
        kind = draw.choice(("switch_one", "switch_one", "switch_two", "kill_worker"))
        faults.append(Fault(draw.uniform(0.0, duration_s * 0.6), False, kind, 0.0, ""))
    if draw.random() < 0.04:
        faults.append(Fault(draw.uniform(0.0, duration_s), False, "stop_boundary", 0.0, ""))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _fault(draw: random.Random, duration_s: float) -> Fault:
    pool = draw.choice((LOSSES, LOSSES, LOSSES, OTHERS, OTHERS, REQUESTS))
    is_early = draw.random() < 0.1
    return Fault(
        at_s=draw.uniform(0.0, 3.0 if is_early else duration_s),
        is_early=is_early,
        kind=draw.choice(pool),
        lasts_s=draw.choice((0.2, 1.0, 4.0, 9.0, 14.0, 25.0)) * draw.uniform(0.5, 1.5),
        aim=draw.choice(AIMS) if draw.random() < 0.6 else "",
    )


def draw_scenario(seed: int, *, without: tuple[str, ...] = ()) -> Scenario:
    """The scenario of `seed`, the same for ever."""
    draw = random.Random(f"scenario {seed}")
    machines = draw.choice((2, 3, 3, 4, 4))
    workers = draw.choice((1, 1, 1, 1, 2)) if machines < 4 else 1
    steps = draw.choice((5, 8, 12, 16))
    step_s = draw.choice((0.02, 0.1, 0.3))
    build_s = draw.choice((0.1, 1.0, 5.0))
    duration_s = steps * (step_s + 0.04)
    return Scenario(
        seed=seed,
        machines=machines,
        workers_per_machine=workers,
        standbys=draw.choice((0, 1, 1, 1, 2, 2, 3)),
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
        revive_s=draw.choice((0.0, 2.0, 5.0, 20.0)),
        faults=_faults(draw, duration_s),
        without=without,
    )
