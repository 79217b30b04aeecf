"""Which checkpoint a restart takes, and from which tier each of its files. Pure.

Decides for the whole group at once (C142): every rank gets the same version, and each file one
source. Newest valid by manifest first; a file that is broken on one tier is taken from another; if
no tier has it, the checkpoint before. Suspect ones are taken only if asked for, and last. Where
something was asked for and nothing valid is there, that is an error: never a silent start from
zero (C13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainmover.checkpoint import hashing
from trainmover.checkpoint.manifest import Manifest
from trainmover.checkpoint.order import order_key
from trainmover.errors import NothingToRestore


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One committed checkpoint on one tier."""

    tier: str
    """`durable`, `disk of m1`: as reports name it."""
    name: str
    manifest: Manifest
    broken: Mapping[str, str] = field(default_factory=dict)
    """Files that are missing or corrupt on this tier, with the reason. On a machine's own disk
    that includes the files of all other machines' ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """Something that was not taken, and why; told once."""

    name: str
    tier: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the person or the job wants."""

    name: str = ""
    """This checkpoint and no other."""
    step: int | None = None
    """A checkpoint of this step and no other."""
    run_id: str = ""
    """Of this run only; empty: the newest run of the job that got furthest."""
    is_required: bool = False
    """A place to restore from was given: nothing there is an error, not a fresh start."""
    allows_suspect: bool = False
    """Take one that may be poisoned if there is no other."""
    left: tuple[tuple[int, int], ...] = ()
    """Step and generation of each way back of that run: what lies behind the step and has a lineage
    below the generation was left, and is never taken."""
    history: tuple[str, ...] = ()
    """Runs that `run_id` continues: theirs come behind its own."""
    begun_at: tuple[int, int] = (-1, 0)
    """Step and lineage at which it began in their checkpoints: what lies behind that, it left."""
    allows_fresh_start: bool = False
    """Start from zero although broken checkpoints are there."""

    @property
    def is_specific(self) -> bool:
        """Whether one checkpoint was named: then nothing else will do."""
        return bool(self.name) or self.step is not None

    def is_of_run(self, manifest: Manifest) -> bool:
        """Whether it belongs to the run, or to what that run has begun from."""
        if not self.run_id or manifest.run_id == self.run_id:
            return True
        step, lineage = self.begun_at
        is_before = manifest.step <= step and manifest.lineage <= lineage
        return manifest.run_id in self.history and is_before


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One answer for all ranks."""

    name: str
    manifest: Manifest
    sources: tuple[tuple[str, str], ...]
    """File and the tier it is taken from, in the manifest's order."""
    passed_over: tuple[Passed, ...]
    """Newer ones that could not be taken."""

    def tiers(self) -> tuple[str, ...]:
        """Every tier that serves something, once."""
        return tuple(dict.fromkeys(tier for _, tier in self.sources))


def choose(
    found: Sequence[Found], asked: Asked | None = None, rejected: Sequence[Passed] = ()
) -> Choice | None:
    """The checkpoint to restore; None for a fresh start, where that is what was wanted.

    Args:
        found: Committed checkpoints of all tiers, best tier first.
        asked: What is wanted; by default the newest, or a fresh start where there is nothing.
        rejected: Directories that are no valid checkpoint, for messages.
    Raises:
        NothingToRestore: Something was asked for, or something broken is there, and nothing valid.
    """
    wanted = asked or Asked()
    groups = _ordered(_groups(found, wanted))
    passed = list(rejected)
    for group in groups:
        manifest = group[0].manifest
        if manifest.is_suspect and not wanted.allows_suspect and not wanted.name:
            passed.append(_suspect(group[0]))
            continue
        sources, missing = _sources(group)
        if not missing:
            if not manifest.is_suspect:
                passed += [_suspect(g[0]) for g in groups if _is_newer_suspect(g, manifest)]
            return Choice(
                name=group[0].name,
                manifest=manifest,
                sources=sources,
                passed_over=tuple(passed),
            )
        tiers = ", ".join(dict.fromkeys(f.tier for f in group))
        passed.append(Passed(name=group[0].name, tier=tiers, reason=missing))
    if not passed and not wanted.is_specific and not wanted.is_required:
        return None
    if passed and wanted.allows_fresh_start and not wanted.is_specific:
        return None
    raise NothingToRestore(_complaint(found, wanted, passed))


def _suspect(item: Found) -> Passed:
    reason = "marked suspect (its loss was not finite, or stuck); taken only where that is allowed"
    return Passed(name=item.name, tier=item.tier, reason=reason)


def _is_newer_suspect(group: Sequence[Found], chosen: Manifest) -> bool:
    other = group[0].manifest
    is_newer = order_key(other) > order_key(chosen)
    return other.is_suspect and other.run_id == chosen.run_id and is_newer


def _complaint(found: Sequence[Found], asked: Asked, passed: Sequence[Passed]) -> str:
    what = asked.name or (f"step {asked.step}" if asked.step is not None else "a checkpoint")
    reasons = "; ".join(f"{p.name} ({p.tier}): {p.reason}" for p in passed[:5])
    others = sorted({f.name for f in found})
    have = f"there are {', '.join(others[-5:])}" if others else "there is none"
    text = f"{what} was to be restored and can't be: {reasons or have}"
    if asked.is_specific:
        return text + "; nothing else is taken in its place"
    return text + "; repair or remove them, or allow a fresh start"


def _groups(found: Sequence[Found], asked: Asked) -> list[list[Found]]:
    """Copies of the same checkpoint on several tiers, together."""
    groups: dict[tuple[object, ...], list[Found]] = {}
    for item in found:
        manifest = item.manifest
        if asked.name and item.name != asked.name:
            continue
        if asked.step is not None and manifest.step != asked.step:
            continue
        if not asked.is_of_run(manifest) or _was_left(manifest, asked, found):
            continue
        if any(manifest.step > step and manifest.lineage < line for step, line in asked.left):
            continue
        groups.setdefault(
            (manifest.run_id, order_key(manifest)[:3], fingerprint(manifest)), []
        ).append(item)
    return list(groups.values())


def _was_left(manifest: Manifest, asked: Asked, found: Sequence[Found]) -> bool:
    """Whether a run that `asked.run_id` continues has gone back in front of it, as it shows itself.

    That run's own knowledge of it went with its journal.
    """
    if not asked.run_id or manifest.run_id == asked.run_id:
        return False
    others = (item.manifest for item in found)
    return any(
        other.run_id == manifest.run_id
        and other.lineage > manifest.lineage
        and other.step <= manifest.step
        for other in others
    )


def fingerprint(manifest: Manifest) -> str:
    """Equal for copies whose files are equal, whenever and by whom they were committed."""
    text = "".join(f"{file.path} {file.size_bytes} {file.xxh3}\n" for file in manifest.files)
    return hashing.checksum(text.encode())


def _ordered(groups: Sequence[list[Found]]) -> list[list[Found]]:
    """Good before suspect; runs as `_runs` orders them; within a run, history backwards."""
    order = _runs([group[0].manifest for group in groups])

    def place(group: list[Found]) -> tuple[bool, int, tuple[int, ...]]:
        manifest = group[0].manifest
        return (not manifest.is_suspect, -order.index(manifest.run_id), order_key(manifest))

    return sorted(groups, key=place, reverse=True)


def _runs(manifests: Sequence[Manifest]) -> list[str]:
    """The job that got furthest first, and of a job the run that was begun last.

    A run that was begun from another's checkpoint stands before it even if it has not got as far:
    somebody went back on purpose. Of two that were begun from one, the one that got further.
    """
    furthest: dict[str, int] = {}
    begun_from: dict[str, str] = {}
    for manifest in manifests:
        run = manifest.run_id
        step = 0 if manifest.is_suspect else manifest.step
        furthest[run] = max(furthest.get(run, 0), step)
        begun_from[run] = manifest.begun_from
    later: dict[str, list[str]] = {}
    for run in sorted(furthest):
        known = begun_from[run] if begun_from[run] in furthest else ""
        later.setdefault(known if known != run else "", []).append(run)
    ordered: list[str] = []

    def reach(run: str) -> int:
        return max([furthest[run], *(reach(each) for each in later.get(run, ()))])

    def visit(runs: Sequence[str]) -> None:
        for run in sorted(runs, key=lambda run: (reach(run), run), reverse=True):
            visit(later.get(run, ()))
            ordered.append(run)

    visit(later.get("", ()))
    # What names each other in a circle was not made by this package: taken last.
    return [*ordered, *(run for run in sorted(furthest) if run not in ordered)]


def _sources(group: Sequence[Found]) -> tuple[tuple[tuple[str, str], ...], str]:
    """A tier for every file, or the reason why one has none."""
    sources: list[tuple[str, str]] = []
    for file in group[0].manifest.files:
        tier = next((f.tier for f in group if file.path not in f.broken), None)
        if tier is None:
            reasons = "; ".join(f"{f.tier}: {f.broken[file.path]}" for f in group)
            return (), f"{file.path} is nowhere whole ({reasons})"
        sources.append((file.path, tier))
    return tuple(sources), ""
