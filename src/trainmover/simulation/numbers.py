"""A training step in integers: small, but as sensitive as the real one.

A rank's state is three numbers: bulk (equal on all ranks), shared (equal, changed after the gate)
and own (personal). Each step mixes all ranks' gradients and the gate's result into them, so that a
wrong version, a mixed one, a lost own state or a skipped gate result shows at the next boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

MASK = (1 << 62) - 1
PRIME = 0x100000001B3
NON_FINITE_EVERY = 9


def mix(*values: int) -> int:
    """A number that depends on all of `values` and their order."""
    state = 0x51F3
    for value in values:
        state = ((state ^ (value & MASK)) * PRIME + (state >> 29)) & MASK
    return state


@dataclass(frozen=True, slots=True)
class Numbers:
    """State of one rank at a boundary."""

    bulk: int
    own: int
    shared: int

    def digest(self) -> int:
        """One number for all of it."""
        return mix(self.bulk, self.own, self.shared)


def first(rank: int, *, is_sharded: bool = False) -> Numbers:
    """State that `main` builds for `rank`."""
    bulk = mix(1, rank) if is_sharded else mix(1)
    return Numbers(bulk, mix(2, rank), mix(3))


def gradient(rank: int, state: Numbers) -> int:
    """What `rank` contributes to the step."""
    return mix(state.bulk, state.own, rank)


def is_non_finite(own_gradient: int) -> bool:
    """Whether this rank's loss is not finite; then no rank updates."""
    return own_gradient % NON_FINITE_EVERY == 0


def own_at_gate(state: Numbers, step: int) -> int:
    """Own state as it is sent to the backups before the gate of `step`."""
    return mix(state.own, step)


def own_after_tail(at_gate: int, *, changes_in_tail: bool) -> int:
    """Own state at the next boundary."""
    return mix(at_gate, 77) if changes_in_tail else at_gate


def tail_value(state: Numbers, step: int) -> int:
    """What a rank contributes to the collective behind the gate of `step`: something that only
    the state in front of the gate gives."""
    return mix(state.bulk, state.own, step, 99)


def apply(
    state: Numbers,
    step: int,
    gradients: tuple[int, ...],
    *,
    is_skipped: bool,
    changes_in_tail: bool,
    tails: tuple[int, ...] = (),
) -> Numbers:
    """State at the boundary behind `step`; `tails` is what the collective behind its gate gave."""
    bulk = mix(state.bulk, 5) if is_skipped else mix(state.bulk, *gradients)
    own = own_after_tail(own_at_gate(state, step), changes_in_tail=changes_in_tail)
    return Numbers(bulk, own, mix(state.shared, step, int(is_skipped), *tails))


def reference(
    world_size: int,
    steps: int,
    *,
    changes_in_tail: bool,
    is_sharded: bool = False,
    has_tail_collective: bool = False,
) -> list[list[int]]:
    """Digest by step and rank of the uninterrupted run, `[steps + 1][world_size]`."""
    run = undisturbed(
        world_size,
        steps,
        changes_in_tail=changes_in_tail,
        is_sharded=is_sharded,
        has_tail_collective=has_tail_collective,
    )
    return [[state.digest() for state in states] for states in run]


def undisturbed(
    world_size: int,
    steps: int,
    *,
    changes_in_tail: bool,
    is_sharded: bool = False,
    has_tail_collective: bool = False,
) -> list[list[Numbers]]:
    """State by step and rank of the uninterrupted run, `[steps + 1][world_size]`."""
    states = [first(rank, is_sharded=is_sharded) for rank in range(world_size)]
    found = [states]
    for step in range(steps):
        gradients = tuple(gradient(rank, state) for rank, state in enumerate(states))
        skipped = any(is_non_finite(value) for value in gradients)
        called = tuple(tail_value(state, step) for state in states)
        tails = called if has_tail_collective else ()
        states = [
            apply(
                state,
                step,
                gradients,
                is_skipped=skipped,
                changes_in_tail=changes_in_tail,
                tails=tails,
            )
            for state in states
        ]
        found.append(states)
    return found
