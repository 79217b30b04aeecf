"""What one seed means: size of the job, speed of everything, and which faults strike when.

Decides nothing while the world runs: a scenario is drawn once, completely, from the seed. Victims
are drawn when the fault strikes, from the world's own random numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

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
    is_sharded: bool = False
    """No rank's bulk state is anybody else's."""
    snapshot_every: int = 0
    """Steps between snapshots; 0: none are taken and agents keep nothing."""
    checkpoint_every: int = 0
    """Steps between durable checkpoints; 0: there is no storage."""
    has_disks: bool = False
    """Checkpoints are written to machines' own disks first."""
    increments_kept: int = 0
    """Updates of each rank that its nearest backup holds; 0: steps are not backed up."""
    storage_fails: float = 0.0
    has_storage: bool = True
    """Whether there is a storage of all, beside machines' own disks."""
    earlier_steps: int = 0
    """Steps of a run before this one, whose checkpoints lie on machines' own disks; 0: none."""
    fetches_end: bool = True
    """Whether what is fetched for a plan ends with it (mutation check)."""
    has_tail_collective: bool = False
    """Every step has a collective behind its gate."""
    slow_tail_s: float = 0.0
    """Time that rank 0 takes behind the gate in the middle of the job (it saves)."""
    overtaken: float = 0.0
    """Share of control messages that later ones overtake; no seed draws it."""
    slots_wait: bool = True
    """Whether a worker leaves a snapshot out rather than write over one that may be needed."""
    without: tuple[str, ...] = ()
    """Rules of the worker's lifecycle that are switched off (mutation check)."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.machines * self.workers_per_machine

    @property
    def closure_calls(self) -> int:
        """Iterations in a whole step; one that is undone has had its first one only."""
        return 3 if self.seed % 4 == 3 else 1

    def level_after(self, step: int) -> int:
        """Level of the snapshot that the cadence wants behind `step`."""
        if self.checkpoint_every and (step + 1) % self.checkpoint_every == 0:
            return 2
        return int(self.snapshot_every > 0 and (step + 1) % self.snapshot_every == 0)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether snapshots are made durable."""
        return self.checkpoint_every > 0 and self.snapshot_every > 0

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The job's, as far as deciders read them."""
        cadence = f"every {self.snapshot_every} steps" if self.snapshot_every else "never"
        directory = "/checkpoints" if self.keeps_checkpoints else ""
        local = "/local" if directory and self.has_disks else ""
        return (
            ("snapshot.cadence", cadence),
            ("checkpoint.directory", directory),
            ("checkpoint.local_directory", local),
            *self._increments,
        )

    @property
    def _increments(self) -> tuple[tuple[str, str], ...]:
        if not self.increments_kept or not self.snapshot_every:
            return ()
        return (("snapshot.increments", "auto"),)


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
    drawn = _with_tails(_draw(seed, without))
    # Drawn apart, so that worlds without kept states stay what they were.
    draw = random.Random(f"kept states {seed}")
    if draw.random() < 0.4:
        return drawn
    every = draw.choice((1, 2, 3, 5))
    # Long enough for copies to be placed and to travel before faults strike.
    steps, step_s = draw.choice((16, 24)), draw.choice((0.1, 0.3))
    duration_s = steps * (step_s + 0.04)
    longer = duration_s / (drawn.steps * (drawn.step_s + 0.04))
    faults = [replace(f, at_s=f.at_s * longer) for f in drawn.faults if not f.is_early]
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        kind = draw.choice(("kill_worker", "kill_worker", "kill_machine", "kill_agent"))
        aim = draw.choice(("", "", "cut_over", "decision", "frozen", "tail"))
        faults.append(Fault(duration_s * draw.uniform(0.4, 1.2), False, kind, 0.0, aim))
    return replace(
        drawn,
        steps=steps,
        step_s=step_s,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        script_fails_at=-1,
        is_sharded=draw.random() < 0.8,
        snapshot_every=every if draw.random() < 0.9 else 0,
        checkpoint_every=draw.choice((0, 0, every, 2 * every)),
        storage_fails=draw.choice((0.0, 0.0, 0.2)),
        slots_wait=draw.random() < 0.6,
        has_disks=draw.random() < 0.4,
        increments_kept=_increments_of(seed, every),
    )


def scenario_of(seed: int, *, without: tuple[str, ...] = ()) -> Scenario:
    """The world of `seed`: a share of them has no storage of all, or loses who is fetched from."""
    drawn = draw_scenario(seed, without=without)
    share = random.Random(f"variant {seed}").random()
    if share < 0.3 and drawn.has_disks and drawn.keeps_checkpoints:
        return with_own_disks(drawn)
    return with_lost_sources(drawn) if share > 0.96 else drawn


def with_own_disks(drawn: Scenario) -> Scenario:
    """The same job on machines that share no storage and go several at once.

    Half of them go on where an earlier run has left checkpoints on their disks.
    """
    draw = random.Random(f"own disks {drawn.seed}")
    every = drawn.snapshot_every or 2
    steps, earlier = max(drawn.steps, 16), draw.choice((0, 0, 4, 8))
    duration_s = (steps - earlier) * (drawn.step_s + 0.04)
    aims = ("", "cut_over", "decision", "frozen", "fetch", "aborted")
    faults = [fault for fault in drawn.faults if draw.random() < 0.5]
    for index in range(draw.choice((1, 1, 2, 3))):
        is_early = earlier > 0 and draw.random() < 0.4
        at_s = draw.uniform(0.0, 12.0) if is_early else duration_s * draw.uniform(0.35, 0.85)
        lasts_s = draw.choice((1.0, 4.0, 12.0))
        aim = draw.choice(aims) if index else ""
        faults.append(Fault(at_s, is_early, "lose_machines", lasts_s, aim))
    return replace(
        drawn,
        steps=steps,
        snapshot_every=every,
        checkpoint_every=every,
        has_disks=True,
        has_storage=False,
        storage_fails=draw.choice((0.0, 0.0, 0.1)),
        earlier_steps=earlier,
        is_sharded=True,
        script_fails_at=-1,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def with_lost_sources(drawn: Scenario) -> Scenario:
    """The same job with losses while joiners fetch, and when their plans are aborted."""
    draw = random.Random(f"fetches {drawn.seed}")
    duration_s = drawn.steps * (drawn.step_s + 0.04)
    faults = list(drawn.faults)
    for kind in ("kill_worker", "silence_source", draw.choice(("silence_source", "kill_worker"))):
        aim = "" if kind == "kill_worker" and not faults else draw.choice(("fetch", "aborted"))
        at_s = duration_s * draw.uniform(0.1, 0.8)
        faults.append(Fault(at_s, False, kind, 0.0, aim))
    first = Fault(duration_s * draw.uniform(0.2, 0.6), False, "kill_machine", 0.0, "")
    return replace(
        drawn,
        move_s=draw.choice((0.1, 1.0, 4.0)),
        standbys=max(drawn.standbys, 2),
        faults=tuple(sorted((*faults, first), key=lambda fault: fault.at_s)),
    )


def _increments_of(seed: int, every: int) -> int:
    # Drawn apart, like tails: enough of them, or too few for the snapshots there are.
    draw = random.Random(f"increments {seed}")
    return draw.choice((0, every + 2, 16)) if draw.random() < 0.7 else 0


def _with_tails(drawn: Scenario) -> Scenario:
    # Drawn apart, like kept states.
    draw = random.Random(f"tails {drawn.seed}")
    if draw.random() < 0.7:
        return drawn
    return replace(
        drawn,
        has_tail_collective=draw.random() < 0.8,
        slow_tail_s=draw.choice((0.0, 0.0, 7.0, 20.0)),
    )


def _draw(seed: int, without: tuple[str, ...]) -> Scenario:
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
