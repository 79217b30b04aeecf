"""Runs one drill from start to verdict.

Decides what is asked of every drill: the job ends with a right code, the kinds of incident are the
expected ones, its numbers are those of the undisturbed run, and nothing is left behind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmover.controller.recovery import NOT_PREPARED
from trainmover.drills.compare import Comparison, compare
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import FOLDER_WORD, JobRequest, JobResult
from trainmover.drills.scenario import Scenario
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.errors import ConfigError, DrillFailed

FINAL_ARGUMENTS: Final = ("--final", f"{FOLDER_WORD}/final.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillJob:
    """The script that a drill trains; it must write a digest of its final state with ``--final``
    and record its loss with ``step.log``."""

    script: Path
    arguments: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    limit_s: float = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillReport:
    """What came of a drill."""

    scenario: Scenario
    seed: int
    result: JobResult | None
    comparison: Comparison | None
    problems: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        """Whether everything was as it must be."""
        return not self.problems

    def sentence(self) -> str:
        """One line for people."""
        seconds = "" if self.result is None else f" ({self.result.seconds:.0f} s)"
        name = f"{self.scenario.name} (seed {self.seed}){seconds}"
        if self.problems:
            return f"{name}: FAILED: " + "; ".join(self.problems)
        if self.comparison is None:
            code = self.result.code if self.result is not None else -1
            return f"{name}: passed, the job stopped with code {code}, as it may"
        return f"{name}: passed, {self.comparison.sentence()}"


def example_job(steps: int = 120) -> DrillJob:
    """The example of the repository in a small size. Raises ConfigError outside a clone."""
    script = Path(__file__).resolve().parents[3] / "examples" / "train_gpt.py"
    if not script.is_file():
        raise ConfigError(f"no {script}: run drills in a clone, or name a script with --script")
    size = ("--layers", "2", "--width", "64", "--heads", "2", "--sequence", "64", "--batch", "2")
    return DrillJob(script=script, arguments=("--steps", str(steps), *size, "--workers", "1"))


def request_of(scenario: Scenario, drill_job: DrillJob) -> JobRequest:
    """How the drill's job is started."""
    return JobRequest(
        script=drill_job.script,
        arguments=(*drill_job.arguments, *FINAL_ARGUMENTS),
        machines=scenario.machines,
        standbys=scenario.standbys,
        settings=(*drill_job.settings, *scenario.settings),
        environment=drill_job.environment,
        faults=scenario.faults,
        limit_s=drill_job.limit_s,
    )


def run_drill(scenario: Scenario, drill_job: DrillJob, seed: int, folder: Path) -> DrillReport:
    """Run the scenario, and the same job undisturbed, and compare.

    Raises:
        DrillFailed: The undisturbed run itself failed: nothing is known about the scenario.
    """
    request = request_of(scenario, drill_job)
    reference = run_undisturbed(request, folder / "undisturbed")
    problems: list[str] = []
    result: JobResult | None = None
    comparison: Comparison | None = None
    with RunningJob(request, folder / scenario.name) as job:
        try:
            scenario.act(job, random.Random(seed))
        except DrillFailed as error:
            if job.code is None or job.code not in scenario.codes:
                problems.append(str(error))
        try:
            result = job.wait_until_done(60.0 if problems else None)
        except DrillFailed as error:
            problems.append(str(error))
        if result is not None:
            problems += job.leftovers() + overdue(job.directory.path)
    if result is not None:
        problems += judge(scenario, result)
    if result is not None and result.code == 0:
        comparison = compare(result, reference)
        if not comparison.is_identical:
            problems.append(comparison.sentence())
    return DrillReport(
        scenario=scenario,
        seed=seed,
        result=result,
        comparison=comparison,
        problems=tuple(problems),
    )


def overdue(directory: Path) -> list[str]:
    """Plans of a job that ran into their deadline: somebody waited for what was never to come."""
    log = directory / "logs" / "controller.log"
    lines = log.read_text(errors="replace").splitlines()
    return [f"a plan was not carried out: {line}" for line in lines if NOT_PREPARED in line]


def judge(scenario: Scenario, result: JobResult) -> list[str]:
    """What is wrong with how the job ended and with its incidents."""
    problems = []
    if result.code not in scenario.codes:
        reason = result.outcome.reason if result.outcome is not None else "no outcome"
        problems.append(f"the job ended with {result.code}: {reason}")
    if result.code != 0 and result.outcome is None:
        problems.append("the job gave no reason for its end")
    kinds = {incident.kind for incident in result.incidents}
    if strange := kinds - scenario.kinds:
        problems.append(f"incidents of kind {', '.join(sorted(strange))} must not occur here")
    if scenario.kinds and scenario.must_be_told and not kinds and result.code == 0:
        problems.append("nothing happened: no incident was reported")
    return problems
