"""The cadence as a setting: `every 50 steps`, `every 30 min`, `budget 2%`, `adaptive`.

Decides the small language only; what the policies mean is in `cadence`. Parts are joined by `or`;
`P until step N, then Q` is denser in the first steps and while the loss is unstable.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from trainmover.checkpoint.cadence import (
    Adaptive,
    AnyOf,
    Budget,
    Denser,
    EveryMinutes,
    EverySteps,
    Never,
    Policy,
)
from trainmover.checkpoint.retention import KeepAll, KeepAny, KeepEvery, KeepLast, Retention
from trainmover.errors import ConfigError

FORMS: Final = (
    "every N steps, every T min (s, h), budget P%, budget X TB/h, adaptive, never, "
    "A or B, A until step N, then B"
)
_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_MINUTES: Final = {"s": 1 / 60, "min": 1.0, "h": 60.0}


def _steps(words: re.Match[str]) -> Policy:
    return EverySteps(int(words.group(1)))


def _minutes(words: re.Match[str]) -> Policy:
    unit = {"s": "s", "m": "min", "h": "h"}[words.group(2)[0]]
    return EveryMinutes(float(words.group(1)) * _MINUTES[unit])


def _share(words: re.Match[str]) -> Policy:
    return Budget(blocked_share=float(words.group(1)) / 100)


def _rate(words: re.Match[str]) -> Policy:
    return Budget(terabytes_per_hour=float(words.group(1)))


_FORMS: Final[tuple[tuple[str, Callable[[re.Match[str]], Policy]], ...]] = (
    (r"every (\d+) steps?", _steps),
    (rf"every {_NUMBER} ?(s|sec|seconds?|min|minutes?|h|hours?)", _minutes),
    (rf"budget {_NUMBER} ?%", _share),
    (rf"budget {_NUMBER} ?tb/h", _rate),
    ("adaptive", lambda _: Adaptive()),
    ("never|off", lambda _: Never()),
)
_UNTIL: Final = re.compile(r"(.+?) until step (\d+), then (.+)")


def parse_cadence(text: str) -> Policy:
    """The policy that `text` names. Raises ConfigError with the forms there are."""
    words = " ".join(text.lower().split())
    until = _UNTIL.fullmatch(words)
    if until is not None:
        return Denser(
            dense=parse_cadence(until.group(1)),
            normal=parse_cadence(until.group(3)),
            first_steps=int(until.group(2)),
        )
    parts = words.split(" or ")
    if len(parts) > 1:
        return AnyOf(tuple(parse_cadence(part) for part in parts))
    for form, make in _FORMS:
        found = re.fullmatch(form, words, re.ASCII)
        if found is not None:
            return make(found)
    raise ConfigError(f"'{text}' is no cadence; expected one of: {FORMS}")


def parse_retention(text: str) -> Retention:
    """`last 3`, `every 1000`, `last 3 or every 1000`, `all`. Raises ConfigError."""
    words = " ".join(text.lower().split())
    parts = words.split(" or ")
    if len(parts) > 1:
        return KeepAny(tuple(parse_retention(part) for part in parts))
    found = re.fullmatch(r"(last|every) (-?\d+)", words, re.ASCII)
    if found is not None:
        count = int(found.group(2))
        return KeepLast(count) if found.group(1) == "last" else KeepEvery(count)
    if words == "all":
        return KeepAll()
    raise ConfigError(f"'{text}' keeps nothing known; expected: last N, every N, A or B, all")
