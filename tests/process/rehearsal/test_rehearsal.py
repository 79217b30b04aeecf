"""Real jobs: classes are found, a standby walks through all of them and leaves no trace."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import tiny
from trainmover.drills import pauses, victims
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import FOLDER_WORD, JobRequest
from trainmover.drills.runner import FINAL_ARGUMENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "roles.py"
QUIET_S = 4.0
WAKES_PER_S = 20.0
WAITED = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)


def request(*arguments: str, **fields: Any) -> JobRequest:
    """A pipeline of four stages on four machines, and one standby."""
    steps = () if "--steps" in arguments else ("--steps", "120")
    start = JobRequest(script=SCRIPT, arguments=(*steps, *arguments, *FINAL_ARGUMENTS))
    return replace(start, limit_s=280.0, **fields)


def standby(job: RunningJob) -> dict[str, Any]:
    """The one ready standby, as status shows it."""
    job.wait_for_standby()
    (found,) = (each for each in (job.status() or {})["standbys"] if each["is_ready"])
    return dict(found)


def worker_log(job: RunningJob, incarnation: str) -> str:
    """What a worker has printed."""
    paths = job.directory.logs.rglob(f"*{incarnation}*")
    return "".join(path.read_text(errors="replace") for path in paths if path.is_file())


def said(job: RunningJob, words: str) -> Callable[[], bool]:
    """Whether the job has printed `words`."""
    return lambda: words in job.output_path.read_text(errors="replace")


def test_a_standby_covers_first_middle_and_last_and_takes_any(tmp_path: Path) -> None:
    wanted = request("--steps", "150")
    with RunningJob(wanted, tmp_path / "job") as job:
        ready = standby(job)
        classes = {each["digest"]: each["ranks"] for each in (job.status() or {})["classes"]}
        assert sorted(classes.values()) == [[0], [1, 2], [3]]
        assert ready["answers"] == "recorded"
        assert set(ready["classes"]) == set(classes)
        assert classes[ready["classes"][-1]] == [1, 2], "the most common class comes last"
        for machine in ("m0", "m1", "m3"):
            job.wait_for_standby()
            job.switchover((machine,))
        log = worker_log(job, ready["incarnation"])
        result = job.wait_until_done()
    assert result.code == 0, result.output
    assert log.count("alive of earlier entries: 0") >= 3
    assert "alive of earlier entries: 1" not in log
    assert "answers recorded" in log
    assert [incident.kind for incident in result.incidents] == ["planned"] * 3
    assert {role.role_class for role in result.incidents[0].roles} == set(classes)
    tiny.assert_identical(result, wanted, tmp_path)


def test_a_shadow_of_rank_0_leaves_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "job" / "live"
    (folder / "out").mkdir(parents=True)
    wanted = request("--impure", f"{FOLDER_WORD}/live", "--steps", "80")
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_step(1)
        # The live rank 0 has made these by now; a shadow of it must not touch them.
        (folder / "train.log").write_text("precious")
        (folder / "out" / "first.pt").write_bytes(b"checkpoint")
        before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
        ready = standby(job)
        assert "rank 0" in worker_log(job, ready["incarnation"])
        after = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
        assert after == before
        assert (folder / "train.log").read_text() == "precious"
        for words in ("open with mode 'w'", "shutil.rmtree", "torch.save", "connects to"):
            job.wait_for(said(job, words), f"a finding about {words}")
        assert "roles.py:" in job.output_path.read_text()
        result = job.wait_until_done()
    assert result.code == 0, result.output


def test_zeros_are_not_good_enough(tmp_path: Path) -> None:
    wanted = request("--steps", "60", flags=("--rehearse-with", "zeros"))
    with RunningJob(wanted, tmp_path / "job") as job:
        words = "a standby failed and is not counted: AssertionError: attention is not finite"
        job.wait_for(said(job, words), "the standby fails")
        assert job.ready_standbys() == []
        result = job.wait_until_done()
    assert result.code == 0, result.output


def log_of_controller(job: RunningJob) -> str:
    """What the controller has decided, and why."""
    path = job.directory.logs / "controller.log"
    return path.read_text(errors="replace") if path.exists() else ""


def test_a_call_that_is_not_in_the_recording_is_refused_and_named(tmp_path: Path) -> None:
    wanted = request("--extra", "--steps", "60")
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for(lambda: "expected no further collective" in log_of_controller(job), "refused")
        assert job.ready_standbys() == []
        result = job.wait_until_done()
    log = log_of_controller(job)
    assert "got all_reduce SUM of [5] float32 among 4, called at roles.py:" in log
    assert result.code == 0, result.output


def test_a_branch_first_taken_after_the_switchover_is_reported(tmp_path: Path) -> None:
    wanted = request("--branch-at", "90", "--steps", "120")
    with RunningJob(wanted, tmp_path / "job") as job:
        job.wait_for_standby()
        job.switchover(("m1",))  # the job lingers in front of its branch
        pauses.let_pass(job.folder, 93)
        job.wait_for_step(92)
        found = job.wait_for(lambda: coverage(job), "what was not rehearsed")
        result = job.wait_until_done()
    (part,) = [part for told in found for part in told.get("parts", ()) if part["kind"] == "module"]
    assert part["step"] == 90
    assert part["what"].endswith("late on [4, 8]")
    assert part["ms"] > 0
    tiny.assert_identical(result, wanted, tmp_path)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.long])])
@pytest.mark.timeout(600)
def test_another_role_is_adopted_without_compiling(backend: str, tmp_path: Path) -> None:
    caches = (("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")),)
    wanted = request("--compile", backend, "--steps", "100000", environment=caches)
    with RunningJob(replace(wanted, limit_s=550.0), tmp_path / "job") as job:
        job.wait_for_standby(timeout_s=500.0)
        ready = standby(job)
        job.switchover(("m0",))
        found = job.wait_for(lambda: coverage(job), "the cost of the second entry")
        log = worker_log(job, ready["incarnation"])
        job.signal(signal.SIGINT)
        job.wait_until_done()
    first = log.split("entered main as rank")[1]
    assert ", 0 graphs compiled" not in first.splitlines()[0], "the rehearsal has compiled"
    (part,) = [part for told in found for part in told["parts"] if part["kind"] == "entry"]
    print(f"adopted in {part['ms']:.0f} ms: {part['what']}")
    assert part["what"] == "main again as rank 0, 0 graphs compiled"
    kept = list((tmp_path / "job" / "run" / "rehearsal").rglob("*.caches"))
    assert bool(kept) == (backend == "inductor")


def coverage(job: RunningJob) -> list[dict[str, Any]]:
    """What `trainmover incidents` adds to the reports."""
    found: list[dict[str, Any]] = job.operator().get("coverage")
    return [told for told in found if told.get("parts")]


def test_the_next_run_of_the_same_job_reuses_its_recordings(tmp_path: Path) -> None:
    wanted = request("--steps", "80", settings=(("rehearsal.store", str(tmp_path / "store")),))
    wanted = replace(wanted, arguments=("--steps", "80"))
    seen = []
    for name in ("first", "second"):
        with RunningJob(wanted, tmp_path / name) as job:
            ready = standby(job)
            assert ready["answers"] == "recorded"
            job.wait_until_done()
            seen.append(log_of_controller(job))
        files = sorted((tmp_path / "store").rglob("*.recording"))
        seen.append(str([(path.name, path.stat().st_mtime_ns) for path in files]))
        assert len(files) == 3
    assert "recording of class" in seen[0]
    assert "recording of class" not in seen[2], "nothing is recorded the second time"
    assert seen[1] == seen[3]


def test_a_standby_fetches_recordings_that_its_machine_does_not_see(tmp_path: Path) -> None:
    store = (("rehearsal.store", str(tmp_path / "disk-of-{machine}")),)
    with RunningJob(request("--steps", "60", settings=store), tmp_path / "job") as job:
        ready = standby(job)
        assert ready["answers"] == "recorded"
        log = worker_log(job, ready["incarnation"])
        assert job.wait_until_done().code == 0
    assert len([line for line in log.splitlines() if line.endswith("fetched")]) == 3
    assert len(list((tmp_path / "disk-of-m4").rglob("*.recording"))) == 3
    assert len(list((tmp_path / "disk-of-m2").rglob("*.recording"))) == 0


def test_a_ready_standby_costs_next_to_nothing(tmp_path: Path) -> None:
    """Under 0.5 % of a core is promised: told, not judged. Judged is what does not depend on how
    busy the machine is: all its threads sleep, and by themselves they hardly ever wake up."""
    with RunningJob(request("--steps", "400"), tmp_path / "job") as job:
        ready = standby(job)
        machine = ready["incarnation"].split(".", maxsplit=1)[0]
        pid = victims.worker_pid(job.directory, machine, ready["incarnation"])
        process = psutil.Process(pid)
        before, wakes, began_s = process.cpu_times(), wakes_of(pid), time.monotonic()
        step = job.last_step()
        job.wait_for(lambda: job.last_step() > step + QUIET_S / 0.04, "some seconds of training")
        after, took_s = process.cpu_times(), time.monotonic() - began_s
        woken = wakes_of(pid) - wakes
        print(f"CPU of a ready standby: {after.user + after.system - before.user - before.system}")
        print(f"{woken} wakes in {took_s:.1f} s")
        assert woken < WAKES_PER_S * took_s
        job.wait_for(lambda: all(state == "S" for state in states_of(pid)), "all threads sleep")


def wakes_of(pid: int) -> int:
    """How often threads of a process have gone to sleep by themselves."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(found) for text in texts for found in WAITED.findall(text))


def states_of(pid: int) -> list[str]:
    """Of each thread, as the kernel names it."""
    paths = Path(f"/proc/{pid}/task").glob("*/stat")
    return [path.read_text().rpartition(")")[2].split()[0] for path in paths]
