"""The tiny job that process tests and drills train, and how they start it.

Decides sizes only: enough steps for a fault and for what follows it, few enough to be quick. The
undisturbed run of one command line is made once per pytest process and shared by all its tests.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trainmover.drills.compare import compare
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.runner import FINAL_ARGUMENTS, DrillJob
from trainmover.drills.undisturbed import run_undisturbed

SCRIPT = Path(__file__).parent / "process" / "scripts" / "tiny.py"
STEPS = 160
SEED_VARIABLE = "TRAINMOVER_TEST_SEED"

ARGUMENTS = ("--steps", str(STEPS))
"""One command line for as many tests as possible: they share its undisturbed run."""


def seed() -> int:
    """Draws victims; printed by tests, and set from outside to repeat a failure."""
    return int(os.environ.get(SEED_VARIABLE, "20261129"))


def drill_job(*arguments: str, limit_s: float = 200.0) -> DrillJob:
    """For scenarios."""
    return DrillJob(script=SCRIPT, arguments=arguments or ARGUMENTS, limit_s=limit_s)


def request(*arguments: str, **fields: object) -> JobRequest:
    """For tests that act themselves."""
    start = JobRequest(script=SCRIPT, arguments=(*(arguments or ARGUMENTS), *FINAL_ARGUMENTS))
    return replace(start, limit_s=200.0, **fields)  # type: ignore[arg-type]


def assert_identical(result: JobResult, wanted: JobRequest, folder: Path) -> None:
    """Every loss and the final state are those of the undisturbed run."""
    comparison = compare(result, run_undisturbed(wanted, folder / "undisturbed"))
    assert comparison.is_identical, comparison.sentence()
