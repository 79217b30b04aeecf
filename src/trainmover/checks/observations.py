"""What is observed of workers: one struct per thing an invariant speaks about. Pure data."""

from __future__ import annotations

import msgspec

from trainmover.protocol.messages import Version


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Root of observations; past tense, of one worker process."""

    incarnation: str


class AttemptBegan(Observation, frozen=True, kw_only=True):
    """Runs `step` of `generation`; how many iterations its models' bucket layout has behind it."""

    generation: int
    step: int
    layout: int


class GateEntered(Observation, frozen=True, kw_only=True):
    """Contributed to gate `step` of `generation`."""

    generation: int
    step: int
    rank: int
    is_tainted: bool
    """Some collective of the step returned an invented value."""
    held: tuple[tuple[int, int], ...]
    """(owner rank, step) of personal state held, of this generation's gate."""
    is_finish: bool = False


class GatePassed(Observation, frozen=True, kw_only=True):
    """All rounds of gate `step` were in, and it was acted on."""

    generation: int
    step: int


class Applied(Observation, frozen=True, kw_only=True):
    """The update of `step`, whose gate passed in `lineage`, with the gate's result."""

    lineage: int
    step: int
    result: tuple[int, ...]
    by_plan: int = 0
    """Number of the plan that ordered it; 0: the gate passed here."""


class StepReached(Observation, frozen=True, kw_only=True):
    """At the boundary of `step` as `rank`, with a digest of the whole state."""

    generation: int
    step: int
    rank: int
    digest: int


class Reported(Observation, frozen=True, kw_only=True):
    """Answered the freeze `number`."""

    number: int


class JoinerLoaded(Observation, frozen=True, kw_only=True):
    """The parts of a joiner's state are there, each of the version its source had."""

    number: int
    bulk: Version
    own: Version
    shared: Version


class SnapshotLoaded(Observation, frozen=True, kw_only=True):
    """Bytes of a snapshot or checkpoint are this rank's state now; `version` is what they had."""

    number: int
    version: Version


class PreparedAt(Observation, frozen=True, kw_only=True):
    """PREPARED for `number` with `applied`."""

    number: int
    applied: Version


class RunsIn(Observation, frozen=True, kw_only=True):
    """Has become a running member of `generation`."""

    generation: int


class Ended(Observation, frozen=True, kw_only=True):
    """The process is over."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """An invariant that does not hold."""

    invariant: str
    """``I1`` to ``I14`` of the protocol, ``P2`` for different numbers."""
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"
