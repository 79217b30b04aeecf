"""Faults inside a step, for drills and tests: which collective of which step is struck, and how.

Environment variable ``TRAINMOVER_STEP_FAULTS``: rules separated by semicolons,

    ACTION@RANK:STEP:CALL     at the CALL-th collective (from 1) of the attempt of version STEP,
                              counted from its boundary (an evaluation due there comes first)
    ACTION@RANK:STEP:gate     when that rank contributes to the gate of STEP
    ACTION@RANK:STEP:tail     right behind the gate of STEP, before the optimizer's update
    ACTION@RANK:STEP:tailCALL at the CALL-th collective (from 1) behind the gate of STEP

    ACTION  reset (the connection to one peer), kill (SIGKILL to this process), stop (SIGSTOP)

STEP counts versions: a step of several parts has one for each. Each rule fires once per job (a
mark in the log directory says so), and never while an earlier interruption is being repaired: it
then waits for the repetition, so that a list of rules sweeps through all its places. Without the
variable nothing is watched.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainmover.errors import ConfigError

VARIABLE = "TRAINMOVER_STEP_FAULTS"
ACTIONS = ("reset", "kill", "stop")
PLACE = re.compile(r"\d+|gate|tail\d*")
NOTICE_LIMIT_S = 5.0
"""Longest wait of a collective until the reset in front of it is known here."""


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
        is_place = len(fields) == 3 and PLACE.fullmatch(fields[2]) is not None
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

    def __init__(
        self, reset: Callable[[], None], is_broken: Callable[[], bool], marks_directory: str
    ) -> None:
        self._marks = Path(marks_directory)
        self._rules = parse(os.environ.get(VARIABLE, ""))
        self._reset = reset
        self._is_broken = is_broken
        self._struck = -1

    @property
    def is_armed(self) -> bool:
        """Whether any rule exists."""
        return bool(self._rules)

    def reached(self, rank: int, step: int, place: str, generation: int) -> None:
        """This process is at `place` of `step`; on the I/O thread for `gate` and `tail`."""
        if generation == self._struck or self._is_broken():
            return
        for rule in self._rules:
            if rule.is_spent or (rule.rank, rule.step, rule.place) != (rank, step, place):
                continue
            rule.is_spent = True
            if self._is_first(rule):
                self._struck = generation
                self._strike(rule)
                return

    def _strike(self, rule: StepFault) -> None:
        print(f"step fault: {rule.action}@{rule.rank}:{rule.step}:{rule.place}", flush=True)
        if rule.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._reset()
            if rule.place not in ("gate", "tail"):
                self._wait_until_broken()

    def _wait_until_broken(self) -> None:
        """Without it the main thread would be some collectives further by then."""
        deadline = time.monotonic() + NOTICE_LIMIT_S
        while not self._is_broken() and time.monotonic() < deadline:
            time.sleep(0.0002)

    def _is_first(self, rule: StepFault) -> bool:
        """Whether no process of the job has carried this rule out."""
        try:
            (self._marks / f"step-fault-{rule.number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
