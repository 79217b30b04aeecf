"""Fault injection at named phases, for drills: what happens when a process dies just here.

Decides whether the running process is the victim; who is to die where is the drill's decision, in
the environment variable ``TRAINMOVER_FAULTS``: rules separated by semicolons,

    ACTION@PHASE[:WHO[:GENERATION[:COUNT]]]

    ACTION      kill (SIGKILL to this process), killgroup (to its process group), stop (SIGSTOP),
                raise (an exception), exit (os._exit(70)), pause=SECONDS
    PHASE       a name of `trainmover.protocol.phases`
    WHO         machine or incarnation, or a part of the latter up to a dot; empty or ``*``: anyone
    GENERATION  number of the generation in the making; empty or ``*``: any
    COUNT       the rule fires at the COUNT-th passage (default 1), and once only

A directory in ``TRAINMOVER_FAULT_MARKS`` makes "once only" hold over restarts: a file
is made there before the action. Without the variable `reached` costs one comparison.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainmover.errors import ConfigError

VARIABLE: Final = "TRAINMOVER_FAULTS"
MARKS_VARIABLE: Final = "TRAINMOVER_FAULT_MARKS"
ACTIONS: Final = ("kill", "killgroup", "stop", "raise", "exit", "pause")


class InjectedFault(RuntimeError):
    """The exception that a ``raise`` rule throws: a bug on purpose, hence no TrainMoverError."""


@dataclass(kw_only=True, slots=True)
class Rule:
    """One parsed rule and how often its phase was passed here."""

    text: str
    action: str
    pause_s: float
    phase: str
    who: str
    generation: int | None
    count: int
    passages: int = field(default=0)
    is_spent: bool = field(default=False)

    def concerns(self, phase: str, who: str, generation: int) -> bool:
        """Whether this passage counts."""
        if self.is_spent or phase != self.phase:
            return False
        if self.generation is not None and self.generation != generation:
            return False
        return self.who in ("", "*", who) or who.startswith(self.who + ".")


def parse(text: str) -> list[Rule]:
    """Rules of one environment variable. Raises ConfigError naming the rule that can't be read."""
    return [_parse_rule(part.strip()) for part in text.split(";") if part.strip()]


def _parse_rule(text: str) -> Rule:
    action, at, rest = text.partition("@")
    name, _, value = action.partition("=")
    fields = rest.split(":")
    if not at or name not in ACTIONS or not fields[0] or len(fields) > 4:
        raise ConfigError(
            f"expected ACTION@PHASE[:WHO[:GENERATION[:COUNT]]] with an action of "
            f"{', '.join(ACTIONS)}; got '{text}'"
        )
    fields += [""] * (4 - len(fields))
    try:
        return Rule(
            text=text,
            action=name,
            pause_s=float(value) if value else 1.0,
            phase=fields[0],
            who=fields[1],
            generation=None if fields[2] in ("", "*") else int(fields[2]),
            count=int(fields[3]) if fields[3] else 1,
        )
    except ValueError as error:
        raise ConfigError(f"a number in the fault rule '{text}' can't be read: {error}") from error


_rules: list[Rule] | None = parse(os.environ[VARIABLE]) if VARIABLE in os.environ else None


def reload() -> None:
    """Read the environment again; a forked worker does so after its environment was replaced."""
    global _rules
    text = os.environ.get(VARIABLE, "")
    _rules = parse(text) if text else None


def reached(phase: str, who: str = "", generation: int = 0) -> None:
    """This process passes `phase`; nothing happens unless a rule says so."""
    if _rules is None:
        return
    for rule in _rules:
        if not rule.concerns(phase, who, generation):
            continue
        rule.passages += 1
        if rule.passages == rule.count:
            rule.is_spent = True
            if _is_first(rule):
                _strike(rule, phase, who, generation)


def _is_first(rule: Rule) -> bool:
    folder = os.environ.get(MARKS_VARIABLE)
    if not folder:
        return True
    name = "".join(letter if letter.isalnum() else "_" for letter in rule.text)
    try:
        descriptor = os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    os.write(descriptor, f"{os.getpid()} {time.monotonic_ns()}\n".encode())
    os.close(descriptor)
    return True


def _strike(rule: Rule, phase: str, who: str, generation: int) -> None:
    match rule.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killgroup":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(70)
        case "pause":
            time.sleep(rule.pause_s)
        case _:
            raise InjectedFault(f"injected at {phase} of generation {generation} in {who}")
