"""Whether two runs of one job have the same numbers: to the bit, every one of them.

Decides what "identical" means: the same steps, each once, every logged value the same hex float,
and the same digests of parameters and optimizer state on every rank. There is no tolerance here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmover.drills.request import JobResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One number that is not the same."""

    step: int
    name: str
    disturbed: str
    undisturbed: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What differs between a disturbed run and the same job left alone."""

    steps: int
    """Steps that the undisturbed run has."""
    values: int
    """Numbers compared."""
    missing: tuple[int, ...]
    added: tuple[int, ...]
    repeated: tuple[int, ...]
    differences: tuple[Difference, ...]
    has_final: bool
    """Whether both runs ended with a digest of the final state."""
    is_final_equal: bool

    @property
    def is_identical(self) -> bool:
        """True when nothing at all differs, and something was compared."""
        is_complete = not (self.missing or self.added or self.repeated)
        has_numbers = self.values > 0 and self.has_final
        return is_complete and has_numbers and not self.differences and self.is_final_equal

    def sentence(self) -> str:
        """The verdict for people; names the first difference."""
        if self.is_identical:
            return (
                f"identical: {self.values} losses of {self.steps} steps and the final "
                "parameters and optimizer state, bit for bit"
            )
        parts = []
        if self.values == 0:
            parts.append("no step was recorded")
        if self.missing:
            parts.append(f"steps missing: {_some(self.missing)}")
        if self.added:
            parts.append(f"steps too many: {_some(self.added)}")
        if self.repeated:
            parts.append(f"steps recorded twice: {_some(self.repeated)}")
        if self.differences:
            first = self.differences[0]
            parts.append(
                f"{len(self.differences)} of {self.values} values differ, first {first.name} of "
                f"step {first.step}: {first.disturbed}, undisturbed {first.undisturbed}"
            )
        if not self.has_final:
            parts.append("a run has no digest of its final state")
        elif not self.is_final_equal:
            parts.append("the final parameters or optimizer state differ")
        return "NOT identical: " + "; ".join(parts)


def compare(disturbed: JobResult, undisturbed: JobResult) -> Comparison:
    """Every logged value and the final state of two runs."""
    ours, theirs = disturbed.losses, undisturbed.losses
    return Comparison(
        steps=len(theirs),
        values=sum(len(values) for values in theirs.values()),
        missing=tuple(sorted(theirs.keys() - ours.keys())),
        added=tuple(sorted(ours.keys() - theirs.keys())),
        repeated=disturbed.repeated,
        differences=tuple(differences(ours, theirs)),
        has_final=disturbed.final is not None and undisturbed.final is not None,
        is_final_equal=disturbed.final == undisturbed.final,
    )


def differences(
    disturbed: Mapping[int, Mapping[str, str]], undisturbed: Mapping[int, Mapping[str, str]]
) -> list[Difference]:
    """Values of steps that both have, compared as the hex floats they were recorded as."""
    found = []
    for step in sorted(disturbed.keys() & undisturbed.keys()):
        names = sorted({*disturbed[step], *undisturbed[step]})
        for name in names:
            ours = disturbed[step].get(name, "-")
            theirs = undisturbed[step].get(name, "-")
            if ours != theirs:
                found.append(Difference(step=step, name=name, disturbed=ours, undisturbed=theirs))
    return found


def has_fallen(losses: Mapping[int, Mapping[str, Any]], name: str = "loss") -> bool:
    """Whether training works: the mean of the last tenth is clearly below the first tenth's."""
    values = [float.fromhex(losses[step][name]) for step in sorted(losses) if name in losses[step]]
    if len(values) < 10:
        return False
    part = max(1, len(values) // 10)
    first, last = sum(values[:part]) / part, sum(values[-part:]) / part
    return last < 0.9 * first


def _some(steps: tuple[int, ...]) -> str:
    text = ", ".join(map(str, steps[:5]))
    return text if len(steps) <= 5 else f"{text}, ... ({len(steps)} in all)"
