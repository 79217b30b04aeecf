"""What a simulated worker's main thread fetches for a plan, one thing at a time.

The main thread takes an order only when the one before is done. A fetch ends with its answer, with
a failure, with the abort of its plan (as `edges.errand` has it), or at its limit: from a machine
that has gone dark nothing comes, not even an end. Whoever waits for the fetch of another plan shows
a rule that is missing: then a plan that could be carried out is not carried out in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmover.simulation.channels import CutOverWork
    from trainmover.simulation.process import Process

LIMIT_S = 60.0
"""Of a transfer without progress."""
PATIENCE_S = 5.0
"""How long another plan may wait for the main thread."""


@dataclass(eq=False)
class Fetch:
    """Something that is being fetched."""

    number: int
    """Of the plan."""
    machine: str
    """From whose agent or worker."""


def begin(process: Process, work: CutOverWork, machine: str) -> Fetch | None:
    """A fetch for `work`; None: the main thread is not free, and `work` goes on once it is."""
    if process.fetch is not None:
        if not work.is_held_up:
            work.is_held_up = True
            process.later(PATIENCE_S, lambda: _check(process, work))
        return None
    work.is_held_up = False
    fetch = Fetch(work.plan.number, machine)
    process.fetch = fetch
    process.world.moment("fetch")
    return fetch


def _check(process: Process, work: CutOverWork) -> None:
    fetch = process.fetch
    if process.cut_over is work and work.is_held_up and fetch is not None:
        text = f"plan {work.plan.number} waits for what it fetches for plan {fetch.number}"
        process.world.fail("I12", f"{process.name}: {text}")


def is_dark(process: Process, machine: str) -> bool:
    """Whether nothing comes from there, not even the end of a stream."""
    world = process.world
    return world.machines[machine].is_dark or world.is_cut(process.machine, machine)


def end(process: Process, fetch: Fetch | None) -> None:
    """It is over; whatever waits for the main thread goes on."""
    if fetch is None or process.fetch is not fetch:
        return
    process.fetch = None
    work = process.cut_over
    if work is not None and work.is_held_up:
        work.proceed()


def call_off(process: Process, number: int) -> None:
    """Plan `number` is not to be."""
    fetch = process.fetch
    if fetch is None or fetch.number > number:
        return
    if process.world.scenario.fetches_end:
        process.fetch = None
    else:
        limit_s = LIMIT_S if is_dark(process, fetch.machine) else process.world.scenario.move_s
        process.later(limit_s, lambda: end(process, fetch))
