"""What two checkpoints have in common and what not, tensor by tensor.

Decides equality by bytes: by the recorded checksums where both were cut alike, by reading where
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainmover.checkpoint.manifest import LayoutEntry
from trainmover.checkpoint.reader import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of a second checkpoint against a first."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reshaped: tuple[str, ...]
    """Other shape or dtype."""
    changed: tuple[str, ...]
    same: tuple[str, ...]
    facts: tuple[tuple[str, str, str], ...]
    """What else differs: name, first's, second's."""

    @property
    def is_same_state(self) -> bool:
        """Whether every tensor is equal, bit for bit."""
        return not (self.only_first or self.only_second or self.reshaped or self.changed)


FACTS = ("run_id", "step", "lineage", "generation", "world_size", "is_suspect")


def compare(
    first: Checkpoint, second: Checkpoint, progress: Callable[[str], None] | None = None
) -> Difference:
    """Compare all tensors. Raises CheckpointError where one can't be read."""
    mine = {entry.name: entry for entry in first.manifest.layout}
    theirs = {entry.name: entry for entry in second.manifest.layout}
    both = sorted(mine.keys() & theirs.keys())
    reshaped, changed, same = [], [], []
    for name in both:
        if _form(mine[name]) != _form(theirs[name]):
            reshaped.append(name)
        elif _is_equal(first, second, mine[name]):
            same.append(name)
        else:
            changed.append(name)
        if progress is not None:
            progress(name)
    facts = [(f, str(getattr(first.manifest, f)), str(getattr(second.manifest, f))) for f in FACTS]
    losses = dict(first.manifest.loss), dict(second.manifest.loss)
    for name in sorted(losses[0].keys() | losses[1].keys()):
        facts.append((f"loss {name}", _shown(losses[0].get(name)), _shown(losses[1].get(name))))
    return Difference(
        only_first=tuple(sorted(mine.keys() - theirs.keys())),
        only_second=tuple(sorted(theirs.keys() - mine.keys())),
        reshaped=tuple(reshaped),
        changed=tuple(changed),
        same=tuple(same),
        facts=tuple(fact for fact in facts if fact[1] != fact[2]),
    )


def _form(entry: LayoutEntry) -> tuple[object, ...]:
    return (entry.dtype, entry.global_shape)


def _shown(value: str | None) -> str:
    return "-" if value is None else repr(float.fromhex(value))


def _is_equal(first: Checkpoint, second: Checkpoint, entry: LayoutEntry) -> bool:
    cuts = [
        {
            (piece.global_offset, piece.shape): piece.xxh3
            for piece in checkpoint.pieces_of(entry.name)
        }
        for checkpoint in (first, second)
    ]
    if cuts[0].keys() == cuts[1].keys():
        return cuts[0] == cuts[1]
    origin = [0] * len(entry.global_shape)
    whole = [c.assemble(entry.name, origin, entry.global_shape) for c in (first, second)]
    return whole[0] == whole[1]
