"""What rides on the step gate: a fixed vector of signed 64-bit integers, merged by maximum.

The vector is short and of equal length on all ranks. A pair (x, -x) merges to (max, -min), so
two equal ends prove that all ranks had the same x. After the fixed slots come two slots per
small tracked object: its digest and the digest negated.
"""

from __future__ import annotations

from typing import Final

import msgspec

STEP: Final = 1
"""Kind of a gate that ends a step."""
FINISH: Final = 2
"""Kind of the gate after the loop."""

SWITCH_NUMBER: Final = 0
STOP_REQUESTED: Final = 1
HAS_UPDATE: Final = 2
HAS_NO_UPDATE: Final = 3
NON_FINITE: Final = 4
NAMES_DIGEST: Final = 5
NAMES_DIGEST_NEGATED: Final = 6
SNAPSHOT: Final = 7
"""0: none, 1: snapshot at the boundary behind this gate, 2: a durable checkpoint of it too,
3: emergency (the job is about to be interrupted)."""
TAIL_SEEN: Final = 8
"""Some rank has called a collective behind a gate: copies of the state in front are wanted."""
TAIL_REFUSED: Final = 9
"""Some rank can't keep one: then nobody does."""
FIXED_SLOTS: Final = 10


class GateFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Decoded flags of one rank or of the merged result."""

    switch_number: int = 0
    """Generation number of a planned switchover to stop for after this step; 0 for none."""
    is_stop_requested: bool = False
    has_update: bool = True
    """Some rank's optimizer steps (merged: any)."""
    has_no_update: bool = False
    """Some rank skips its update (merged: any). Both true in a result: ranks disagree."""
    is_non_finite: bool = False
    names_digest: int = 0
    snapshot: int = 0
    has_tail_collectives: bool = False
    """A collective was called behind a gate."""
    is_copy_refused: bool = False
    """This rank can't keep a copy of the state in front of a gate."""
    digests: tuple[int, ...] = ()
    """Own digest per small tracked object (before merging)."""


def encode(flags: GateFlags) -> tuple[int, ...]:
    """The vector to contribute, `[10 + 2 * objects] int64`."""
    fixed = [0] * FIXED_SLOTS
    fixed[SWITCH_NUMBER] = flags.switch_number
    fixed[STOP_REQUESTED] = int(flags.is_stop_requested)
    fixed[HAS_UPDATE] = int(flags.has_update)
    fixed[HAS_NO_UPDATE] = int(flags.has_no_update)
    fixed[NON_FINITE] = int(flags.is_non_finite)
    fixed[NAMES_DIGEST] = flags.names_digest
    fixed[NAMES_DIGEST_NEGATED] = -flags.names_digest
    fixed[SNAPSHOT] = flags.snapshot
    fixed[TAIL_SEEN] = int(flags.has_tail_collectives)
    fixed[TAIL_REFUSED] = int(flags.is_copy_refused)
    tail: list[int] = []
    for digest in flags.digests:
        tail += (digest, -digest)
    return (*fixed, *tail)


class GateResult(msgspec.Struct, frozen=True, kw_only=True):
    """Merged flags, equal on every rank that passed."""

    vector: tuple[int, ...]

    @property
    def switch_number(self) -> int:
        """Generation number of the planned switchover to stop for; 0 for none."""
        return self.vector[SWITCH_NUMBER]

    @property
    def is_stop_requested(self) -> bool:
        """Whether the job stops at the boundary behind this gate."""
        return bool(self.vector[STOP_REQUESTED])

    @property
    def has_update(self) -> bool:
        """Whether any rank updates."""
        return bool(self.vector[HAS_UPDATE])

    @property
    def snapshot(self) -> int:
        """Level of the snapshot wanted at the boundary behind this gate; 0 for none."""
        return self.vector[SNAPSHOT]

    @property
    def is_copy_kept(self) -> bool:
        """Whether every rank keeps what it had in front of this gate, to be able to go back."""
        return bool(self.vector[TAIL_SEEN]) and not self.vector[TAIL_REFUSED]

    @property
    def is_update_disputed(self) -> bool:
        """Whether some ranks update and others do not: an error of the script."""
        return bool(self.vector[HAS_UPDATE]) and bool(self.vector[HAS_NO_UPDATE])

    @property
    def are_names_equal(self) -> bool:
        """Whether all ranks track the same names."""
        return self.vector[NAMES_DIGEST] == -self.vector[NAMES_DIGEST_NEGATED]

    def are_equal(self) -> tuple[bool, ...]:
        """Per small tracked object: whether its digest was equal on all ranks."""
        tail = self.vector[FIXED_SLOTS:]
        return tuple(tail[i] == -tail[i + 1] for i in range(0, len(tail), 2))
