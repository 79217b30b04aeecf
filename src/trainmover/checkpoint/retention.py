"""Which checkpoints are kept. Pure; `cleaning` deletes.

Decides on whole versions: copies of one version stand and fall together. The newest good one is
kept whatever the policy says, a suspect one never counts towards what is kept, and no good one
goes for a suspect one (C137). It is called after a commit, never before: what is to be deleted is
older than something durable (C03, C18).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainmover.checkpoint.names import name_of
from trainmover.checkpoint.order import order_key
from trainmover.checkpoint.survey import Committed
from trainmover.errors import ConfigError

KEPT_SUSPECTS = 1
"""Newest suspect ones that are kept aside, for people to look at."""


class Retention(Protocol):
    """A rule that names the steps to keep."""

    def keeps(self, steps: Sequence[int]) -> frozenset[int]:
        """Of the good checkpoints' steps, newest first, those to keep (as positions)."""


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest `count` checkpoints."""

    count: int

    def __post_init__(self) -> None:
        # isinstance: a settings file can say "x" (C18), True counts as 1 in Python
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 1:
            raise ConfigError(f"keep_last: expected a whole number from 1, got {self.count!r}")

    def keeps(self, steps: Sequence[int]) -> frozenset[int]:
        """Positions 0 to count - 1."""
        return frozenset(range(min(self.count, len(steps))))


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Checkpoints whose step is a multiple of `steps`, for ever."""

    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise ConfigError(f"keep_every: expected a whole number from 1, got {self.steps!r}")

    def keeps(self, steps: Sequence[int]) -> frozenset[int]:
        """Positions of multiples."""
        return frozenset(place for place, step in enumerate(steps) if step % self.steps == 0)


@dataclass(frozen=True, slots=True)
class KeepAny:
    """What any of several rules keeps."""

    rules: tuple[Retention, ...]

    def keeps(self, steps: Sequence[int]) -> frozenset[int]:
        """The union."""
        return frozenset().union(*(rule.keeps(steps) for rule in self.rules))


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Everything."""

    def keeps(self, steps: Sequence[int]) -> frozenset[int]:
        """Every position."""
        return frozenset(range(len(steps)))


def to_delete(
    committed: Sequence[Committed],
    policy: Retention,
    *,
    run_id: str = "",
    history: Sequence[str] = (),
) -> tuple[str, ...]:
    """Names that may go, oldest first.

    Args:
        committed: Everything committed on one store.
        policy: What to keep.
        run_id: Look at this run only; empty: each job by itself, a run together with those that
            it continues.
        history: Runs that `run_id` continues, nearest first: all are counted as one.
    """
    jobs = [(run_id, *history)] if run_id else histories(committed)
    gone: list[str] = []
    for job in jobs:
        gone += _of_one_job(committed, job, policy)
    return tuple(gone)


def histories(committed: Sequence[Committed]) -> list[tuple[str, ...]]:
    """Jobs on a store, each as its runs, newest first; no run is in two of them."""
    known: dict[str, tuple[str, ...]] = {}
    for item in committed:
        known[item.manifest.run_id] = item.manifest.history
    jobs: list[tuple[str, ...]] = []
    taken: set[str] = set()
    # The longest histories first: they hold the others.
    for run in sorted(known, key=lambda run: (-len(known[run]), run)):
        if run not in taken:
            job = (run, *(each for each in known[run] if each not in taken))
            taken.update(job)
            jobs.append(job)
    return jobs


def _of_one_job(
    committed: Sequence[Committed], runs: Sequence[str], policy: Retention
) -> list[str]:
    """`runs`, newest first: what a later run has saved is newer, whatever its number is."""
    mine = [c for c in committed if c.manifest.run_id in runs]
    place = {run: -index for index, run in enumerate(runs)}

    def age(item: Committed) -> tuple[int, ...]:
        return (place[item.manifest.run_id], *order_key(item.manifest))

    ordered = sorted(mine, key=age, reverse=True)
    good = _versions(c for c in ordered if not c.manifest.is_suspect)
    suspects = _versions(c for c in ordered if c.manifest.is_suspect)
    kept = policy.keeps([version[0].manifest.step for version in good]) | {0}
    doomed = [version for place, version in enumerate(good) if place not in kept]
    doomed += suspects[KEPT_SUSPECTS:]
    doomed.sort(key=lambda version: age(version[0]))
    return [c.name for version in doomed for c in version if _is_ours(c)]


def _versions(committed: Iterable[Committed]) -> list[list[Committed]]:
    versions: dict[tuple[str, int, int], list[Committed]] = {}
    for item in committed:
        manifest = item.manifest
        key = (manifest.run_id, manifest.lineage, manifest.step)
        versions.setdefault(key, []).append(item)
    return list(versions.values())


def _is_ours(committed: Committed) -> bool:
    """A copy that a person made under another name is never deleted (CK-4)."""
    manifest = committed.manifest
    expected = name_of(manifest)
    return committed.name.split("~")[0] == expected
