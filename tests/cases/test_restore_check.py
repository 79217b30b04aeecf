"""What is restored is what was saved, and it is said: B11, C146."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.exact import assert_exact
from tests.cases.lives import checks_of, kill_behind, life, run_on
from tests.cases.runs import committed, end, kill_all, request, undisturbed
from tests.holding import TRACED, let_go, wait_until_held, wait_until_told
from trainmover.drills.harness import RunningJob
from trainmover.drills.request import JobRequest
from trainmover.protocol import exits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
PLACE = 40
STEPS = 100


def test_a_roll_back_repeats_its_losses_and_the_validation(tmp_path: Path) -> None:
    """No rank has a replica: all go back to a snapshot, and do the same again."""
    wanted = request(
        "--spread",
        "fsdp2",
        "--validate",
        *("--stop-at", "2", "10"),
        steps=24,
        standbys=1,
        settings=(("snapshot.cadence", "every 1000 steps"), TRACED),
    )
    with RunningJob(wanted, tmp_path / "job") as job:
        wait_until_told(job, "TakeSnapshot", 1)  # behind the start; no other one is taken
        let_go(job, 2)
        wait_until_held(job, 10)
        job.wait_for(lambda: (job.status() or {}).get("snapshot_step", -1) > 0, "a snapshot")
        job.kill_worker(1)
        let_go(job, 10)
        job.wait_for_incidents(1)
        result = end(job)
        checks = checks_of(job)
    assert result.incidents[0].kind == "rollback", result.output
    restored = next(check for check in checks if check.source.startswith("snapshot of step"))
    assert restored.compared == 1
    assert "1 validation results bit for bit" in restored.text
    again = next(check for check in checks if check.source == "steps done again")
    assert "all equal to those before, bit for bit" in again.text
    assert again.compared >= 2
    assert not any(check.differing for check in checks)
    arguments = ("--spread", "fsdp2", "--validate")
    assert_exact(tmp_path / "job" / "out", undisturbed(arguments, 24, 2), ranks=2, steps=24)


def killed(folder: Path, *arguments: str) -> None:
    wanted = life(folder, PLACE, *arguments, steps=STEPS, machines=1)
    kill_behind(wanted, folder / "one", folder, PLACE, further=4)


def test_a_restart_is_compared_with_the_run_before(tmp_path: Path) -> None:
    """Losses behind the checkpoint, the validation, the first loss beside the last one; then the
    same start with other results and losses, which by default gets a word, by choice the end."""
    killed(tmp_path, "--validate")
    for copy in ("warned", "stopped"):
        shutil.copytree(tmp_path / "checkpoints", tmp_path / copy / "checkpoints")
    wanted = life(tmp_path, 100, "--validate", steps=STEPS, machines=1)
    result, checks = run_on(wanted, tmp_path / "two")
    restored, again = checks
    assert restored.source.startswith("checkpoint step-")
    assert "last recorded loss" in restored.text
    assert restored.compared == 1
    assert again.source.startswith("steps done again behind checkpoint step-")
    assert "bit for bit" in again.text
    assert not restored.differing
    assert not again.differing
    assert restored.text in result.output
    assert_exact(tmp_path / "out", undisturbed(("--validate",), STEPS, 1), ranks=1, steps=STEPS)
    warned(tmp_path / "warned")
    stopped(tmp_path / "stopped")


SKEWED = ("--validate", "--skew", "0.001", "--drift", "0.001")


def warned(folder: Path) -> None:
    result, checks = run_on(life(folder, 100, *SKEWED, steps=STEPS, machines=1), folder / "job")
    names = [check.differing[0].name for check in checks if check.differing]
    assert names[:2] == ["validation.loss", f"loss of step {PLACE}"], checks
    assert "suspects, in this order: random generators" in result.output


def stopped(folder: Path) -> None:
    stop = (("worker.restore_mismatch", "stop"),)
    wanted = life(folder, 100, *SKEWED, steps=STEPS, machines=1, settings=stop)
    with RunningJob(wanted, folder / "job") as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code in (exits.SCRIPT_FAILED, exits.STOPPED_BY_OPERATOR), result.output
    assert "validation.loss is" in result.output


@pytest.mark.long
def test_c146_what_is_not_tracked_is_named_before_the_first_resumed_step(tmp_path: Path) -> None:
    """C146: the scheduler would begin anew, silently; in the strict form that is an error."""
    killed(tmp_path, "--forget")
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "strict" / "checkpoints")
    strict = (("worker.is_strict", "true"),)
    wanted = life(tmp_path / "strict", 100, "--forget", steps=STEPS, machines=1, settings=strict)
    with RunningJob(wanted, tmp_path / "strict" / "job") as job:
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == exits.SCRIPT_FAILED, result.output
    assert "found but not tracked: LambdaLR 'scheduler'" in result.output
    assert not (tmp_path / "strict" / "out").exists()
    result, _ = run_on(life(tmp_path, 100, "--forget", steps=STEPS, machines=1), tmp_path / "told")
    assert "found but not tracked: LambdaLR 'scheduler'" in result.output


@pytest.mark.long
def test_the_example_of_the_quickstart_is_exact(tmp_path: Path) -> None:
    """C146: the page's script, slowed down, killed behind a checkpoint and started again."""
    page = Path(__file__).parents[2] / "docs" / "quickstart.md"
    block = page.read_text().split("```python\n")[1].split("```")[0]
    script, paced = tmp_path / "example.py", tmp_path / "paced.py"
    script.write_text(block)
    slow = "loss.backward(); __import__('time').sleep(0.5)"
    paced.write_text(block.replace("loss.backward()", slow))

    def example(file: Path, folder: str, every: int) -> JobRequest:
        wanted = life(tmp_path / folder, every, steps=20, machines=1)
        return replace(wanted, script=file, arguments=())

    with RunningJob(example(paced, "killed", 4), tmp_path / "killed" / "one") as job:
        place = tmp_path / "killed" / "checkpoints"
        job.wait_for(lambda: committed(place), "a checkpoint", 90.0)
        kill_all(job)
    losses = []
    for folder in ("killed", "undisturbed"):
        with RunningJob(example(script, folder, 100), tmp_path / folder / "last") as job:
            end(job)
            losses.append({step: record.values for step, record in job.losses().items()})
    # The last line in front of the checkpoint is told again: it may have been lost.
    assert sorted(losses[0]) == list(range(min(losses[0]), 20))
    assert 3 <= min(losses[0]) < 12
    assert sorted(losses[1]) == list(range(20))
    assert all(losses[0][step] == losses[1][step] for step in losses[0])
