"""The loop: commands of one event are carried out before the next event; deadlines bring ticks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from trainmover.daemons.loop import Decider, DeciderLoop
from trainmover.units import Instant


@dataclass(frozen=True)
class Result:
    """A transition of the toy decider: counts events, says what came."""

    state: int
    commands: tuple[str, ...]
    reason: str = ""


def transition(state: int, event: str, now: Instant) -> Result:
    return Result(state + 1, (f"{event}-1", f"{event}-2"))


def loop_of(
    done: list[str], last: str, *, deadline: Instant | None = None
) -> DeciderLoop[int, str, str]:
    def act(command: str) -> None:
        done.append(command)
        if command == "a-1":
            loop.post("late")
        if command == last:
            loop.stop()

    decider = Decider(transition=transition, next_deadline=lambda _: deadline, tick="tick")
    loop: DeciderLoop[int, str, str] = DeciderLoop(decider, 0, act, "test")
    return loop


def test_an_event_posted_by_a_command_waits_for_its_turn() -> None:
    done: list[str] = []

    async def play() -> None:
        loop = loop_of(done, "late-2")
        loop.post("a")
        loop.post("b")
        await loop.run()
        assert loop.state == 3

    asyncio.run(play())
    assert done == ["a-1", "a-2", "b-1", "b-2", "late-1", "late-2"]


def test_a_passed_deadline_is_a_tick() -> None:
    done: list[str] = []

    async def play() -> None:
        await loop_of(done, "tick-1", deadline=Instant(0)).run()

    asyncio.run(play())
    assert done[0] == "tick-1"


def test_a_failing_action_ends_the_loop_with_its_exception() -> None:
    async def play() -> None:
        def act(command: str) -> None:
            raise ValueError(command)

        decider = Decider(transition=transition, next_deadline=lambda _: None, tick="tick")
        loop: DeciderLoop[int, str, str] = DeciderLoop(decider, 0, act, "test")
        loop.post("a")
        await loop.run()

    with pytest.raises(ValueError, match="a-1"):
        asyncio.run(play())
