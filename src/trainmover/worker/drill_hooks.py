"""Faults inside a step, for drills and tests: which collective of which step is struck, and how.

Environment variable ``TRAINMOVER_STEP_FAULTS``: rules separated by semicolons,

    ACTION@RANK:STEP:CALL     at the CALL-th collective (from 1) of the attempt of version STEP
    ACTION@RANK:STEP:gate     when that rank contributes to the gate of STEP
    ACTION@RANK:STEP:tail     right behind the gate of STEP, before the optimizer's update

    ACTION  reset (the connection to one peer), kill (SIGKILL to this process), stop (SIGSTOP)

Each rule fires once per job (a mark in the log directory says so). Without the variable nothing
is watched.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainmover.errors import ConfigError

VARIABLE = "TRAINMOVER_STEP_FAULTS"
ACTIONS = ("reset", "kill", "stop")


@dataclass
class StepFault:
    """One rule."""

    action: str
    rank: int
    step: int
    place: str
    number: int
    is_spent: bool = False


def parse(text: str) -> list[StepFault]:
    """Rules of one variable. Raises ConfigError naming the rule that can't be read."""
    rules: list[StepFault] = []
    for part in (part.strip() for part in text.split(";") if part.strip()):
        action, _, where = part.partition("@")
        fields = where.split(":")
        is_place = len(fields) == 3 and (fields[2] in ("gate", "tail") or fields[2].isdigit())
        if action not in ACTIONS or not is_place or not (fields[0] + fields[1]).isdigit():
            raise ConfigError(
                f"{VARIABLE}: expected ACTION@RANK:STEP:CALL with an action of "
                f"{', '.join(ACTIONS)}; got '{part}'"
            )
        number = len(rules)
        rules.append(StepFault(action, int(fields[0]), int(fields[1]), fields[2], number))
    return rules


class StepFaults:
    """Rules that concern this process."""

    def __init__(self, reset: Callable[[], None], marks_directory: str) -> None:
        self._marks = Path(marks_directory)
        self._rules = parse(os.environ.get(VARIABLE, ""))
        self._reset = reset

    @property
    def is_armed(self) -> bool:
        """Whether any rule exists."""
        return bool(self._rules)

    def reached(self, rank: int, step: int, place: str) -> None:
        """This process is at `place` of `step`."""
        for rule in self._rules:
            if rule.is_spent or (rule.rank, rule.step, rule.place) != (rank, step, place):
                continue
            rule.is_spent = True
            if not self._is_first(rule):
                continue
            if rule.action == "reset":
                self._reset()
            elif rule.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)

    def _is_first(self, rule: StepFault) -> bool:
        """Whether no process of the job has carried this rule out."""
        try:
            (self._marks / f"step-fault-{rule.number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
