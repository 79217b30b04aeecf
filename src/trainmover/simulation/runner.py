"""Runs seeds, judges how each ended, prints one line that reproduces a failure.

Decides whether an end is legitimate: complete with the right numbers, or stopped with a reason that
the scenario gave cause for, within a bound. Anything else is a violation of I12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trainmover.protocol import exits
from trainmover.simulation.scenario import Scenario, scenario_of
from trainmover.simulation.world import World

BOUND_S = 700.0
"""Simulated time after which a job that has neither ended nor stopped counts as hung."""
EVENT_LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one seed ended."""

    seed: int
    code: int | None
    """Exit code of the job; None: it never ended."""
    reason: str
    violations: tuple[str, ...]
    digest: str
    """Of the journal: equal for equal seeds."""
    events: int
    simulated_s: float


@dataclass
class Summary:
    """How all seeds ended."""

    first: int
    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    by_code: dict[str, int] = field(default_factory=dict)
    failures: list[Outcome] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether no seed violated anything."""
        return not self.failures

    def lines(self) -> list[str]:
        """What a person reads."""
        total = f"{self.seeds} seeds from {self.first}, {self.events} events"
        ends = ", ".join(f"{name}: {count}" for name, count in sorted(self.by_code.items()))
        found = [f"{total}, {self.simulated_s / 3600:.1f} simulated hours", f"ended: {ends}"]
        for failure in self.failures:
            found.append(f"seed {failure.seed}: {failure.violations[0]}")
            found.append(f"reproduce: trainmover simulate --seeds 1 --first {failure.seed}")
        return found

    def __str__(self) -> str:
        return "\n".join(self.lines())


def run_world(world: World) -> None:
    """Let `world` run to its end, its bound, or its first violation."""
    world.begin()
    limit = round(BOUND_S * 1e9)
    while world.schedule.step():
        if world.violations or world.commander.end is not None:
            break
        if world.schedule.now > limit or world.schedule.count > EVENT_LIMIT:
            break


def run_seed(
    seed: int, *, without: tuple[str, ...] = (), scenario: Scenario | None = None
) -> Outcome:
    """One seed from power-on to its judged end."""
    world = World(scenario or scenario_of(seed, without=without))
    run_world(world)
    return judge(world)


def trace(seed: int) -> list[str]:
    """Everything that happened in the world of `seed`, a line per move; for a person at a desk."""
    world = World(scenario_of(seed), keeps_trace=True)
    run_world(world)
    return [str(world.scenario), *world.lines, str(judge(world))]


def judge(world: World) -> Outcome:
    """The outcome of a world that has run."""
    violations = [str(violation) for violation in world.violations]
    end = world.commander.end
    if not violations and end is None:
        phase = type(world.commander.state.phase).__name__ if world.commander.state else "none"
        seconds = world.schedule.now / 1e9
        violations.append(f"I12: not ended after {seconds:.0f} s, the controller is in {phase}")
    elif end is not None and not violations:
        cause = _illegitimate(world, end.code)
        if cause:
            violations.append(f"I12: ended with {end.code} ({end.reason}): {cause}")
    return Outcome(
        seed=world.scenario.seed,
        code=end.code if end is not None else None,
        reason=end.reason if end is not None else "",
        violations=tuple(violations),
        digest=world.digest.hexdigest(),
        events=world.schedule.count,
        simulated_s=world.schedule.now / 1e9,
    )


def _illegitimate(world: World, code: int) -> str:
    """Why the scenario gave no cause for this end; empty if it did."""
    scenario = world.scenario
    match code:
        case exits.COMPLETED:
            missing = set(range(scenario.world_size)) - world.finished_ranks
            lost = len(world.losses) * scenario.workers_per_machine
            is_excused = lost >= len(missing)
            return "" if is_excused else f"ranks {sorted(missing)} never finished"
        case exits.NOT_SAVED:
            return "" if scenario.keeps_checkpoints else "nothing was to be saved"
        case exits.SCRIPT_FAILED:
            return "" if world.has_script_failed else "the script did not fail"
        case exits.STOPPED_BY_OPERATOR | exits.SUSPENDED:
            return "" if world.may_stop else "nobody asked for it"
        case exits.CANNOT_RESTORE:
            step = world.restorable
            return "" if step is None else f"state of step {step} was there"
        case exits.NO_MACHINE:
            return "" if _is_short_of_machines(world) else "there were machines enough"
        case exits.START_FAILED:
            is_to_blame = scenario.earlier_steps > 0 and world.restorable is None
            is_excused = is_to_blame or _is_short_of_machines(world)
            return "" if is_excused else "there were machines enough"
        case _:
            return "no scenario gives cause for this"


def _is_short_of_machines(world: World) -> bool:
    usable = [item for item in world.machine_list() if item.is_alive and not item.has_left]
    return len(usable) < world.scenario.machines


def run(
    seeds: int,
    first: int = 0,
    *,
    without: tuple[str, ...] = (),
    on_outcome: Callable[[Outcome], None] | None = None,
    max_failures: int = 20,
) -> Summary:
    """Seeds `first` to `first + seeds - 1`."""
    summary = Summary(first)
    for seed in range(first, first + seeds):
        outcome = run_seed(seed, without=without)
        summary.seeds += 1
        summary.events += outcome.events
        summary.simulated_s += outcome.simulated_s
        name = "never" if outcome.code is None else exits.REASONS.get(outcome.code, "unknown")
        summary.by_code[name] = summary.by_code.get(name, 0) + 1
        if outcome.violations:
            summary.failures.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
        if len(summary.failures) >= max_failures:
            break
    return summary
