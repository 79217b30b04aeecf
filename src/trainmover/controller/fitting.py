"""What a save costs, as this job's own saves have shown, and whether one more fits the time left.

Decides nothing about what is done instead. A save that nobody has measured yet is tried: the end of
the time bounds it, and an unfinished one harms nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from trainmover.controller import lookup
from trainmover.controller.kept import Kept
from trainmover.controller.move import Move
from trainmover.controller.state import State, Training
from trainmover.protocol.messages import CostsMeasured
from trainmover.units import MIB, Instant, in_seconds

TELL_AGAIN_S: Final = 60.0
"""A worker that has not heard it goes by what it has seen itself."""


def measure(move: Move, before: Kept) -> None:
    """Behind each move: note when a version's way to storage begins, and how long it took."""
    kept = move.state.kept
    if kept is before:
        return
    is_news = kept.durable is not None and kept.durable != before.durable
    if is_news and kept.saving is not None and kept.durable is not None:
        version, since = kept.saving
        if kept.durable.version == version:
            took_s = max(in_seconds(move.now - since), 0.001)
            kept = replace(kept, saving=None, save_s=took_s, save_bytes=_bytes_of(kept))
    # The next one may have begun in the same move.
    if kept.writing is not None and (kept.saving is None or kept.saving[0] != kept.writing.version):
        kept = replace(kept, saving=(kept.writing.version, move.now))
    if kept is not move.state.kept:
        move.state = replace(move.state, kept=kept)


def tell(move: Move) -> None:
    """Rank 0, whose cadence goes by it: what saves cost and how often the job has failed."""
    state, kept = move.state, move.state.kept
    names = lookup.member_names(state)
    if not kept.keeping.checkpoint.is_on or not names or not isinstance(state.phase, Training):
        return
    news = (names[0], kept.save_s, state.incident_count)
    at = kept.told_costs_at
    if news == kept.told_costs and at is not None and not move.has_waited(at, TELL_AGAIN_S):
        return
    body = CostsMeasured(
        term=state.term,
        save_s=kept.save_s,
        failures=state.incident_count,
        elapsed_s=in_seconds(move.now - state.started_at),
    )
    move.tell(names[0], body)
    move.state = replace(state, kept=replace(kept, told_costs=news, told_costs_at=move.now))


def _bytes_of(kept: Kept) -> int:
    """Bytes of the newest checkpoint's snapshots, copies not counted."""
    if kept.durable is None:
        return 0
    sizes = {
        held.rank: held.size_bytes
        for _, store in sorted(kept.stores.items())
        for held in store.held
        if held.version == kept.durable.version
    }
    return sum(sizes.values())


def time_left_s(state: State, now: Instant) -> float | None:
    """Until the job has to have ended; None: there is no limit."""
    return None if state.stop_by is None else max(0.0, in_seconds(state.stop_by - now))


def is_hurried(state: State, now: Instant) -> bool:
    """Whether the job, or a machine of it, is about to be taken away."""
    leaving = (state.machines.get(member.machine) for member in lookup.members(state))
    return state.stop_by is not None or any(
        machine is not None and machine.leave_by is not None and now < machine.leave_by
        for machine in leaving
    )


def does_save_fit(state: State, now: Instant) -> bool:
    """Whether a checkpoint that is begun now would be durable in time, as far as is known."""
    left_s = time_left_s(state, now)
    return left_s is None or state.kept.save_s <= left_s


def cost_text(kept: Kept) -> str:
    """What a checkpoint takes, for people."""
    if not kept.save_s:
        return "how long a checkpoint takes is not known yet"
    rate = kept.save_bytes / kept.save_s / MIB
    return f"the last checkpoint took {kept.save_s:.1f} s ({rate:.1f} MiB/s)"


def switchover_s(state: State) -> float:
    """How long the latest planned switchover took, from its begin; 0: not known."""
    for report in reversed(state.closed):
        if report.kind == "planned" and report.phases:
            return max(phase.after_ns for phase in report.phases) / 1e9
    return 0.0


def does_switchover_fit(state: State, leave_by: Instant | None, now: Instant) -> bool:
    """Whether a planned switchover that is begun now would end in time, as far as is known."""
    if leave_by is None or now >= leave_by:
        return True  # it should be gone and is not: whoever said so was wrong
    return switchover_s(state) <= in_seconds(leave_by - now)
