"""`make demo`: a job loses one machine on request, one without warning, and no number changes.

Decides what is shown and what the verdict rests on: the same job is really run a second time,
undisturbed, and every loss and the final state are compared. Exit code 1 unless they are identical,
both events happened, and the loss fell.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainmover.drills import report, timeline
from trainmover.drills.compare import Comparison, compare, has_fallen
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest, JobResult
from trainmover.drills.runner import FINAL_ARGUMENTS, example_job
from trainmover.drills.undisturbed import undisturbed_request
from trainmover.errors import DrillFailed

MACHINES: Final = 4
STANDBYS: Final = 1
FIRST_FAULT_STEP: Final = 20
STEPS_BETWEEN: Final = 15
LEAVES: Final = "m1"
DIES: Final = "m2"
PLAIN_INTERVAL_S: Final = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Size of the demo."""

    folder: Path
    """Where report.json and timeline.png go."""
    steps: int = 160
    """Long enough for a machine to leave, to come back as the standby, and for another to die."""
    model: tuple[str, ...] = ("--batch", "2")
    """More arguments of examples/train_gpt.py."""
    limit_s: float = 420.0
    keeps_run: bool = False
    """Keep journals, logs and losses of both runs beside the report."""


@dataclass(kw_only=True)
class Narrator:
    """Tells what happens; shows the step while it works."""

    console: Console
    started_s: float = field(default_factory=time.monotonic)
    _live: Live | None = None
    _plain_at: float = 0.0

    def say(self, text: str, style: str = "") -> None:
        """One line that stays."""
        line = Text(f"{time.monotonic() - self.started_s:6.1f} s  ")
        line.append(text, style=style)
        self.console.print(line)

    def __enter__(self) -> Narrator:
        if self.console.is_terminal:
            self._live = Live(Text(""), console=self.console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def follow(self, job: RunningJob, what: str, steps: int) -> None:
        """The line that changes."""
        losses = job.losses()
        step = max(losses, default=-1)
        text = f"{what}: starting"
        if step >= 0:
            loss = float.fromhex(losses[step].values["loss"])
            done = round(30 * (step + 1) / steps)
            bar = "#" * done + "." * (30 - done)
            text = f"{what}: [{bar}] step {step + 1}/{steps}, loss {loss:.4f}"
        if self._live is not None:
            self._live.update(Text(text))
        elif time.monotonic() - self._plain_at > PLAIN_INTERVAL_S:
            self._plain_at = time.monotonic()
            self.say(text)


@dataclass(kw_only=True)
class Demo:
    """One demo from start to verdict."""

    config: DemoConfig
    narrator: Narrator

    def run(self) -> int:
        """Both runs, the tables, the verdict; the exit code."""
        self.config.folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="trainmover-demo-"))
        try:
            return self._run(work)
        finally:
            if self.config.keeps_run:
                shutil.copytree(work, self.config.folder / "runs", dirs_exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)

    def _run(self, work: Path) -> int:
        say = self.narrator.say
        request = self._request()
        say(
            f"a small GPT on {MACHINES} machines, with {STANDBYS} standby, {self.config.steps} "
            f"steps; {LEAVES} will leave, {DIES} will die"
        )
        with self.narrator, RunningJob(request, work / "disturbed") as job:
            self._disturb(job)
            disturbed = self._finish(job, "training")
            losses = job.losses()
            machines = sorted(
                path.stem for path in (job.directory.path / "options").glob("m*.json")
            )
        say("now the same job once more, undisturbed, in a process tree of its own")
        with self.narrator, RunningJob(undisturbed_request(request), work / "undisturbed") as job:
            undisturbed = self._finish(job, "undisturbed")
        comparison = compare(disturbed, undisturbed)
        summaries = [report.summarise(incident, losses) for incident in disturbed.incidents]
        picture = self.config.folder / "timeline.png"
        machines = [f"m{index}" for index in range(MACHINES + STANDBYS)]
        timeline.draw(picture, losses, disturbed.incidents, summaries, machines)
        (self.config.folder / "report.json").write_bytes(
            report.as_json(
                summaries,
                disturbed.incidents,
                comparison,
                steps=self.config.steps,
                seconds=time.monotonic() - self.narrator.started_s,
                losses={step: record.values for step, record in losses.items()},
            )
        )
        self.narrator.console.print(report.phase_table(summaries))
        self.narrator.console.print(report.roles_table(disturbed.incidents))
        say(f"picture: {picture}; report: {self.config.folder / 'report.json'}")
        return self._verdict(disturbed, undisturbed, comparison)

    def _request(self) -> JobRequest:
        script = example_job().script
        size = ("--steps", str(self.config.steps), *self.config.model)
        return JobRequest(
            script=script,
            arguments=(*size, *FINAL_ARGUMENTS),
            machines=MACHINES,
            standbys=STANDBYS,
            limit_s=self.config.limit_s,
        )

    # ------------------------------------------------------------------ what happens

    def _disturb(self, job: RunningJob) -> None:
        self._wait(job, lambda: job.last_step() >= 0, "the first step", 90.0)
        self.narrator.say("training has begun")
        self._wait(job, lambda: bool(job.ready_standbys()), "the standby is ready", 60.0)
        self.narrator.say(f"standby {job.ready_standbys()[0]} is READY")
        self._wait(job, lambda: job.last_step() >= FIRST_FAULT_STEP, "some steps", 60.0)
        reply = job.switchover((LEAVES,))
        self.narrator.say(f"planned switchover of {LEAVES}: {reply.text}", "cyan")
        self._wait(
            job,
            lambda: LEAVES in job.ready_standbys(),
            f"{LEAVES} comes back as the standby",
            60.0,
        )
        self.narrator.say(f"{LEAVES} is back, and READY as the standby", "cyan")
        step = job.last_step() + STEPS_BETWEEN
        self._wait(job, lambda: job.last_step() >= step, "some steps", 60.0)
        count = len(job.incidents())
        job.kill_machine(DIES)
        self.narrator.say(f"SIGKILL to every process of {DIES}", "red")
        self._wait(job, lambda: len(job.incidents()) > count, "the job is back", 60.0)
        last = job.incidents()[-1]
        self.narrator.say(f"the job is back: {last.kind}, {last.outcome}", "red")

    def _finish(self, job: RunningJob, what: str) -> JobResult:
        while job.code is None:
            self.narrator.follow(job, what, self.config.steps)
            if job.time_left() <= 0:
                raise DrillFailed(f"not done after {self.config.limit_s:.0f} s; {job.tail()}")
            time.sleep(0.1)
        result = job.result()
        if result.code != 0:
            raise DrillFailed(f"the job ended with {result.code}; {job.tail()}")
        job.assert_no_leftovers()
        self.narrator.say(f"{what}: {len(result.losses)} steps done, nothing left behind")
        return result

    def _wait(
        self, job: RunningJob, claim: Callable[[], bool], what: str, timeout_s: float
    ) -> None:
        def watched() -> bool:
            self.narrator.follow(job, "training", self.config.steps)
            return claim()

        job.wait_for(watched, what, timeout_s)

    def _verdict(self, disturbed: JobResult, undisturbed: JobResult, comparison: Comparison) -> int:
        kinds = [incident.kind for incident in disturbed.incidents]
        problems = [] if comparison.is_identical else [comparison.sentence()]
        if "planned" not in kinds:
            problems.append("no planned switchover happened")
        if "standby" not in kinds:
            problems.append("no lost machine was replaced by a standby")
        if not has_fallen(undisturbed.losses):
            problems.append("the loss did not fall: nothing was learnt")
        for problem in problems:
            self.narrator.say(problem, "bold red")
        if not problems:
            self.narrator.say(comparison.sentence(), "bold green")
        return 1 if problems else 0


def run_demo(config: DemoConfig) -> int:
    """The whole demo; exit code 0 only for a convincing one."""
    narrator = Narrator(console=Console(highlight=False, soft_wrap=True))
    try:
        return Demo(config=config, narrator=narrator).run()
    except DrillFailed as error:
        narrator.say(str(error), "bold red")
        return 1
    except KeyboardInterrupt:
        narrator.say("interrupted; everything that was started has been ended", "bold")
        return 130


if __name__ == "__main__":
    sys.exit(run_demo(DemoConfig(folder=Path("demo-report"))))
