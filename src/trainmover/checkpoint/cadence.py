"""When a checkpoint is due, and what a cadence costs. Pure.

Decides from plain values that the caller measures; one process decides for the whole job, so that
all ranks save at the same step. Formulae: Young, and Daly's higher order, for the interval between
saves that lose the least; blocked time and bytes per hour for budgets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt
from typing import Final, Protocol

from trainmover.errors import ConfigError

DEFAULT_FAILURE_S: Final = 24 * 3600.0
"""Time between failures assumed before this job has told its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CadenceState:
    """What is known at a step boundary."""

    step: int
    now_s: float
    """On any monotonic clock."""
    last_save_step: int
    """Of the last save that was begun, or the step the job began at."""
    last_save_s: float
    """When that was, on the same clock."""
    save_cost_s: float = 0.0
    """From a save's begin until it is durable, as last measured; 0 before the first."""
    blocked_s: float = 0.0
    """How long training stood still for it."""
    save_bytes: int = 0
    """Bytes of a full checkpoint of the whole job."""
    failures: int = 0
    """Of this job so far."""
    elapsed_s: float = 0.0
    """How long this job has run."""
    loss_is_unstable: bool = False
    step_s: float = 0.0
    """Median step time; needed for what a cadence in steps costs."""

    @property
    def since_s(self) -> float:
        """Seconds since the last save."""
        return self.now_s - self.last_save_s


class Policy(Protocol):
    """A rule for when to save."""

    def is_due(self, state: CadenceState) -> bool:
        """Whether a checkpoint is to be taken at this boundary."""

    def interval_s(self, state: CadenceState) -> float:
        """Seconds between saves as things stand; infinite where nobody knows yet."""


@dataclass(frozen=True, slots=True)
class Never:
    """No checkpoint but those asked for by hand."""

    def is_due(self, state: CadenceState) -> bool:
        """Never."""
        return False

    def interval_s(self, state: CadenceState) -> float:
        """Infinite."""
        return float("inf")


@dataclass(frozen=True, slots=True)
class EverySteps:
    """At multiples of `steps`, so that a job that goes on from step 15 saves where others do."""

    steps: int

    def __post_init__(self) -> None:
        _check(isinstance(self.steps, int) and self.steps >= 1, "steps from 1", self.steps)

    def is_due(self, state: CadenceState) -> bool:
        """At a multiple, or behind one that was missed, whatever the clock says."""
        return state.step // self.steps > state.last_save_step // self.steps

    def interval_s(self, state: CadenceState) -> float:
        """Steps times the median step time."""
        return self.steps * state.step_s if state.step_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Every `minutes` minutes."""

    minutes: float

    def __post_init__(self) -> None:
        _check(0 < self.minutes < float("inf"), "minutes above 0", self.minutes)

    def is_due(self, state: CadenceState) -> bool:
        """At the first boundary after the time has passed; never twice at one step."""
        return state.step > state.last_save_step and state.since_s >= self.interval_s(state)

    def interval_s(self, state: CadenceState) -> float:
        """As set."""
        return 60 * self.minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """As often as a budget allows: a share of the time blocked, or TB written per hour."""

    blocked_share: float | None = None
    """0.02 is two percent."""
    terabytes_per_hour: float | None = None

    def __post_init__(self) -> None:
        _check(
            self.blocked_share is not None or self.terabytes_per_hour is not None,
            "a blocked share or TB per hour",
            None,
        )
        share, rate = self.blocked_share, self.terabytes_per_hour
        _check(share is None or 0 < share < 1, "a share between 0 and 1", share)
        _check(rate is None or 0 < rate < float("inf"), "TB per hour above 0", rate)

    def is_due(self, state: CadenceState) -> bool:
        """The first one early, to be measured; then by what it cost."""
        return state.step > state.last_save_step and state.since_s >= self.interval_s(state)

    def interval_s(self, state: CadenceState) -> float:
        """The longest that any of the two asks for, and never shorter than a save takes."""
        wanted = [state.save_cost_s, FIRST_SAVE_S if state.save_cost_s == 0 else 0.0]
        if self.blocked_share is not None:
            wanted.append(state.blocked_s / self.blocked_share)
        if self.terabytes_per_hour is not None:
            wanted.append(state.save_bytes / 1e12 / self.terabytes_per_hour * 3600)
        return max(wanted)


FIRST_SAVE_S: Final = 60.0
"""After how long a cadence that needs a measurement takes its first checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """Daly's interval from the measured cost of a save and this job's own failures."""

    shortest_s: float = 60.0
    longest_s: float = 3600.0
    expected_failure_s: float = DEFAULT_FAILURE_S
    """Time between failures that counts as one observed before the job began."""

    def __post_init__(self) -> None:
        _check(
            0 < self.shortest_s <= self.longest_s and self.expected_failure_s > 0,
            "0 < shortest_s <= longest_s",
            (self.shortest_s, self.longest_s),
        )

    def is_due(self, state: CadenceState) -> bool:
        """At the first boundary after the interval."""
        return state.step > state.last_save_step and state.since_s >= self.interval_s(state)

    def interval_s(self, state: CadenceState) -> float:
        """Between the limits, and never shorter than a save takes: saves don't overlap."""
        if state.save_cost_s == 0:
            return min(FIRST_SAVE_S, self.longest_s)
        ideal = daly_interval_s(state.blocked_s, self.time_between_failures_s(state))
        return max(min(max(ideal, self.shortest_s), self.longest_s), state.save_cost_s)

    def time_between_failures_s(self, state: CadenceState) -> float:
        """The expectation, corrected by what has happened: one failure is no rate yet."""
        return (state.elapsed_s + self.expected_failure_s) / (state.failures + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Denser:
    """One policy in the first steps and while the loss is unstable, another one otherwise."""

    dense: Policy
    normal: Policy
    first_steps: int = 2000

    def __post_init__(self) -> None:
        _check(self.first_steps >= 0, "first_steps from 0", self.first_steps)

    def is_due(self, state: CadenceState) -> bool:
        """Whichever asks first while it is dense."""
        return self.normal.is_due(state) or (self._is_dense(state) and self.dense.is_due(state))

    def interval_s(self, state: CadenceState) -> float:
        """Of the one in force."""
        normal = self.normal.interval_s(state)
        return min(normal, self.dense.interval_s(state)) if self._is_dense(state) else normal

    def _is_dense(self, state: CadenceState) -> bool:
        return state.loss_is_unstable or state.step < self.first_steps


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Due when any of several policies is."""

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        _check(bool(self.policies), "at least one policy", self.policies)

    def is_due(self, state: CadenceState) -> bool:
        """The first one decides."""
        return any(policy.is_due(state) for policy in self.policies)

    def interval_s(self, state: CadenceState) -> float:
        """The shortest."""
        return min(policy.interval_s(state) for policy in self.policies)


ACCELERATOR_FAILURE_S: Final = 8 * 86400 * 1000 / 6.5
"""Between two interruptions of one accelerator: 6.5 per 1000 days of a node with eight of them."""


def expected_failure_s(accelerators: int) -> float:
    """Time between failures of a job that has told nothing of its own yet.

    A small job hardly ever fails by itself; it would believe its own failures too late if its
    expectation counted for years, hence the upper bound.
    """
    return min(DEFAULT_FAILURE_S, ACCELERATOR_FAILURE_S / max(1, accelerators))


def with_expectation(policy: Policy, failure_s: float) -> Policy:
    """`policy` with this expectation wherever it is adaptive."""
    match policy:
        case Adaptive():
            return replace(policy, expected_failure_s=failure_s)
        case Denser():
            return replace(
                policy,
                dense=with_expectation(policy.dense, failure_s),
                normal=with_expectation(policy.normal, failure_s),
            )
        case AnyOf():
            return AnyOf(tuple(with_expectation(each, failure_s) for each in policy.policies))
        case _:
            return policy


def young_interval_s(cost_s: float, time_between_failures_s: float) -> float:
    """Young's first-order optimum."""
    return sqrt(2 * cost_s * time_between_failures_s)


def daly_interval_s(cost_s: float, time_between_failures_s: float) -> float:
    """Daly's higher-order optimum, between the end of one save and the begin of the next."""
    mean = time_between_failures_s
    if cost_s >= 2 * mean:
        return mean
    ratio = sqrt(cost_s / (2 * mean))
    return young_interval_s(cost_s, mean) * (1 + ratio / 3 + ratio**2 / 9) - cost_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a cadence costs as things stand."""

    interval_s: float
    blocked_share: float
    terabytes_per_hour: float
    age_s: float
    """Oldest that the newest durable state gets: interval plus the time to become durable."""
    lost_share: float
    """Expected share of time repeated after failures that lose all memory tiers."""


def cost(policy: Policy, state: CadenceState, *, between_failures_s: float | None = None) -> Cost:
    """What `policy` costs with the measured values in `state` (B12)."""
    interval = policy.interval_s(state)
    mean = between_failures_s or Adaptive().time_between_failures_s(state)
    span = max(interval, state.blocked_s, 1e-9)
    return Cost(
        interval_s=interval,
        blocked_share=state.blocked_s / span,
        terabytes_per_hour=state.save_bytes / 1e12 / span * 3600,
        age_s=interval + state.save_cost_s,
        lost_share=min(1.0, (interval / 2 + state.save_cost_s) / mean),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Cadences for a job of some size (B6)."""

    full: Policy
    """Durable checkpoints."""
    increments: Policy
    """Increments between them; Never where there are none."""
    backups: Policy
    """Backups in peers' memory (B5)."""
    is_per_machine: bool
    """Whether every machine writes its shards by itself and losses are served by peers first."""


def defaults_for(accelerators: int) -> Defaults:
    """Defaults by scale: under 32 accelerators, up to 256, above."""
    _check(accelerators >= 1, "accelerators from 1", accelerators)
    early = EveryMinutes(5)
    if accelerators < 32:
        full, increments = EveryMinutes(15), Never()
        return Defaults(
            full=Denser(dense=early, normal=full),
            increments=increments,
            backups=EverySteps(50),
            is_per_machine=False,
        )
    if accelerators <= 256:
        return Defaults(
            full=Denser(dense=EveryMinutes(30), normal=EveryMinutes(120)),
            increments=EveryMinutes(10),
            backups=EverySteps(50),
            is_per_machine=False,
        )
    return Defaults(
        full=Denser(dense=EveryMinutes(15), normal=EveryMinutes(45)),
        increments=Never(),
        backups=EverySteps(50),
        is_per_machine=True,
    )


def _check(holds: bool, expected: str, seen: object) -> None:
    if not holds:
        raise ConfigError(f"cadence: expected {expected}, got {seen!r}")
