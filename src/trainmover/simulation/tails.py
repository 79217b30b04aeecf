"""The simulated way from a gate to the next boundary: a collective there, and a rank that is slow.

Does with integers what worker/tail.py does with tensors: a rank whose collective is cut short
stands in front of its gate again, one that has the tail behind it goes back when a plan says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmover.protocol.messages import Plan, Version
from trainmover.simulation import numbers
from trainmover.simulation.channels import TailData
from trainmover.worker import events as worker_events

if TYPE_CHECKING:
    from trainmover.simulation.numbers import Numbers
    from trainmover.simulation.process import Process

TAIL_S = 0.005


@dataclass
class Tail:
    """One rank's tail of `step`."""

    step: int
    main_life: int
    then: Callable[[tuple[int, ...]], None]
    """Called with what all ranks have contributed to the collective."""
    has_called: bool = False
    is_void: bool = False


@dataclass(frozen=True)
class Kept:
    """What a rank had in front of the last gate."""

    version: Version
    numbers: Numbers


def begin(process: Process, step: int, then: Callable[[tuple[int, ...]], None]) -> None:
    """The gate of `step` has passed: update, save, and call the collective if there is one."""
    scenario = process.world.scenario
    tail = Tail(step, process.main_life, then)
    process.tail = tail
    is_slow = process.life.rank == 0 and step == scenario.steps // 2
    delay_s = TAIL_S + (scenario.slow_tail_s if is_slow else 0.0)
    process.later(delay_s, lambda: _call(process, tail))


def _call(process: Process, tail: Tail) -> None:
    if process.tail is not tail or tail.main_life != process.main_life:
        return
    if not process.world.scenario.has_tail_collective:
        process.tail = None
        tail.then(())
        return
    tail.has_called = True
    if process.is_broken:
        strike(process)
        return
    value = numbers.tail_value(process.numbers, tail.step)
    process.tail_data[tail.step, process.life.rank] = value
    frame = TailData(process.generation, tail.step, process.life.rank, value)
    for _, channel in sorted(process.channels.items()):
        channel.send(process, frame)
    check(process)


def check(process: Process) -> None:
    """Go on once everybody's part is here."""
    tail = process.tail
    if tail is None or not tail.has_called or tail.is_void:
        return
    world_size = process.world.scenario.world_size
    found = [process.tail_data.get((tail.step, rank)) for rank in range(world_size)]
    values = tuple(value for value in found if value is not None)
    if len(values) == world_size:
        process.tail = None
        process.later(TAIL_S, lambda: _over(process, tail, values))


def _over(process: Process, tail: Tail, values: tuple[int, ...]) -> None:
    if tail.main_life == process.main_life:
        tail.then(values)


def strike(process: Process) -> None:
    """The generation has broken: a collective that waits is cut short."""
    tail = process.tail
    if tail is None or not tail.has_called or tail.is_void:
        return
    tail.is_void = True
    process.feed(worker_events.TailStruck(step=tail.step))
    process.later(TAIL_S, lambda: _back(process, tail))


def _back(process: Process, tail: Tail) -> None:
    if process.tail is not tail or tail.main_life != process.main_life:
        return
    process.tail = process.attempt = process.kept = None
    process.at_boundary(tail.step)


def keep(process: Process) -> None:
    """The tail is over, and its numbers are not taken over yet."""
    if process.world.scenario.has_tail_collective:
        process.kept = Kept(process.life.applied, process.numbers)


def can_go_back(process: Process, step: int) -> bool:
    """Whether what stood in front of the gate before `step` is kept."""
    return process.kept is not None and process.kept.version.step == step - 1


def go_back(process: Process, plan: Plan) -> None:
    """A stayer begins its cut-over: where the plan leads one gate back, take those numbers."""
    kept = process.kept
    is_live = plan.kind == "unplanned" and not (plan.is_rollback or plan.is_fresh_start)
    if kept is None or not is_live or plan.target != kept.version:
        return
    process.numbers, process.kept = kept.numbers, None
    process.observe_step()
