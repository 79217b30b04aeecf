"""Notices: signals to whoever started the job or to an agent, files, `preempt`; what is saved."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.holding import let_go, let_run, times_told, wait_until_held, wait_until_told
from tests.process.emergency.jobs import (
    assert_suspended,
    goes_on_exactly,
    held,
    kept,
    slow,
    steps_of,
)
from tests.process.snapshots.jobs import (
    assert_identical,
    sharded,
    wait_for_complete,
    wait_until_settled,
)
from trainmover.drills import victims
from trainmover.drills.harness import RunningJob
from trainmover.protocol import exits
from trainmover.protocol.messages import PreemptionNotice, SaveRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SAVE = "TakeSnapshot -> a snapshot of level 2"
"""As a worker's log tells of it: one that is to become a checkpoint."""


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)],
    ids=lambda n: n.name,
)
def test_a_signal_suspends_the_job_and_another_one_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    wanted = held(kept(tmp_path, "--grace", "60"), 8)
    with RunningJob(wanted, tmp_path / "first") as job:
        wait_until_held(job, 8)
        job.signal(number)
        wait_until_told(job, "StopAtBoundary")
        let_go(job, 8)
        result = job.wait_until_done(45.0)
        assert_suspended(result, job)
    assert f"{number.name}: stopping at the next boundary" in result.output
    assert "the last state goes to storage" in result.output
    (step,) = steps_of(tmp_path)
    assert step == max(result.losses) + 1, "no step is lost"
    goes_on_exactly(wanted, tmp_path)


def test_what_does_not_fit_is_not_begun_and_the_earlier_checkpoint_stays(
    slow_library: Path, tmp_path: Path
) -> None:
    often = (("checkpoint.cadence", "every 10 steps"), ("snapshot.cadence", "every 10 steps"))
    wanted = kept(
        tmp_path,
        settings=often,
        environment=(("TRAINMOVER_GRACE_S", "12"), *slow(slow_library, tmp_path, 800)),
    )
    with RunningJob(held(wanted, 15), tmp_path / "first") as job:
        job.wait_for(lambda: (job.status() or {}).get("checkpoint_step", -1) > 0, "one is known")
        before = steps_of(tmp_path)
        job.signal(signal.SIGTERM)
        wait_until_told(job, "StopAtBoundary")
        let_go(job, 15)
        result = job.wait_until_done(20.0)
        assert_suspended(result, job)
    assert len(before) == 1
    assert steps_of(tmp_path) == before
    assert "that does not fit" in result.output
    assert "it goes on from the checkpoint of step" in result.output


def test_sigusr2_makes_a_checkpoint_and_training_goes_on(tmp_path: Path) -> None:
    wanted = held(kept(tmp_path, steps=80), 5, 20, 40)
    with RunningJob(wanted, tmp_path / "first") as job:
        wait_until_held(job, 5)
        job.signal(signal.SIGUSR2)
        wait_until_told(job, SAVE, 1)
        let_go(job, 5)
        wait_until_held(job, 20)
        job.wait_for(lambda: steps_of(tmp_path), "a checkpoint", 30.0)
        wait_until_settled(job, 0)
        before = times_told(job, SAVE)
        reply = job.operator().request(SaveRequest(request="another"))
        assert reply.is_accepted
        job.wait_for(lambda: sum(times_told(job, SAVE)) > sum(before), "rank 0 has heard of it")
        let_go(job, 20)
        wait_until_held(job, 40)
        job.wait_for(lambda: len(steps_of(tmp_path)) >= 2, "another checkpoint", 30.0)
        let_go(job, 40)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert sorted(result.losses) == list(range(80))


def test_a_notice_moves_the_ranks_to_a_standby(tmp_path: Path) -> None:
    topology = tmp_path / "topology"
    lines = (f"{name} rack={name} switch={name} power=p" for name in ("m0", "m1", "m2"))
    topology.write_text("\n".join(lines))
    wanted = replace(kept(tmp_path, "--topology", str(topology)), standbys=1)
    with RunningJob(held(wanted, 8, 50), tmp_path / "first") as job:
        job.wait_for_standby()
        wait_until_held(job, 8)
        fatal = job.wait_for(lambda: (job.status() or {}).get("snapshot_fatal"), "places")
        assert fatal == ["power p"], "one power domain feeds all"
        assert "1 machine lost at once: 100 %" in job.status()["snapshot_worth"]  # type: ignore[index]
        notice = PreemptionNotice(request="n", machines=("m1",), grace_s=60.0)
        reply = job.operator().request(notice)
        assert reply.is_accepted and "move to a standby" in reply.text, reply.text
        wait_until_told(job, "RaiseFlag")
        let_go(job, 8)
        (incident,) = job.wait_for_incidents(1)
        assert incident.kind == "planned"
        assert incident.roles[1].machine == "m2"
        wait_until_held(job, 50)
        assert job.member(1).machine == "m2"
        unknown = PreemptionNotice(request="u", machines=("m7",), grace_s=60.0)
        assert not job.operator().request(unknown).is_accepted
        let_go(job, 50)
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output


@pytest.mark.long
def test_without_a_standby_the_copies_outlive_the_machine(tmp_path: Path) -> None:
    rarely = (("snapshot.cadence", "every 100000 steps"),)
    wanted = sharded(steps=140, machines=2, standbys=0, settings=rarely)
    with RunningJob(held(wanted, 2, 30, 60), tmp_path / "job") as job:
        wait_until_told(job, "TakeSnapshot", 1)
        let_go(job, 2)
        wait_until_held(job, 30)
        first = wait_for_complete(job, 0)
        before = times_told(job, "TakeSnapshot")
        notice = PreemptionNotice(request="n", machines=("m1",), grace_s=60.0)
        reply = job.operator().request(notice)
        assert "no standby" in reply.text and "all ranks take a snapshot" in reply.text, reply.text
        job.wait_for(lambda: sum(times_told(job, "TakeSnapshot")) > sum(before), "one has heard")
        let_go(job, 30)
        wait_until_held(job, 60)
        saved = wait_for_complete(job, first)
        assert saved > 30
        job.kill_worker(0)
        let_run(job, 60)
        (incident,) = job.wait_for_incidents(1)
        assert incident.kind == "rollback" and incident.resumed_step == saved
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert_identical(result, wanted, tmp_path)


@pytest.mark.long
def test_a_file_says_that_a_machine_goes(tmp_path: Path) -> None:
    file = tmp_path / "notice-{machine}"
    settings = (("agent.notice_file", str(file)), ("checkpoint.cadence", "every 100000 steps"))
    wanted = replace(kept(tmp_path), standbys=1, settings=settings)
    with RunningJob(held(wanted, 8), tmp_path / "first") as job:
        job.wait_for_standby()
        wait_until_held(job, 8)
        (tmp_path / "notice-m0").write_text("45\n")
        wait_until_told(job, "RaiseFlag")
        let_go(job, 8)
        (incident,) = job.wait_for_incidents(1)
        assert incident.kind == "planned"
        assert incident.roles[0].machine == "m2"
        result = job.wait_until_done()
        job.assert_no_leftovers()
    assert result.code == 0, result.output
    assert "notice-m0" in result.output or "m0 is to end in" in result.output


def test_a_script_keeps_its_own_handler(tmp_path: Path) -> None:
    script = Path(__file__).with_name("own_handler.py")
    wanted = held(replace(kept(tmp_path, "--grace", "60"), script=script), 5)
    with RunningJob(wanted, tmp_path / "first") as job:
        wait_until_held(job, 5)
        job.signal(signal.SIGTERM)
        wait_until_told(job, "StopAtBoundary")
        let_go(job, 5)
        result = job.wait_until_done(45.0)
        assert_suspended(result, job)
    logs = "".join(path.read_text() for path in (tmp_path / "first" / "run").rglob("rank*.log"))
    assert "the script's own handler" not in logs
    assert "handler in place: True" in logs
    (step,) = steps_of(tmp_path)
    assert step == max(result.losses) + 1


def test_an_agents_end_is_bounded_by_its_grace_time(tmp_path: Path) -> None:
    """Nobody takes over: the machine goes in time, and the job goes on without it."""
    wanted = replace(kept(tmp_path, "--grace", "8", steps=4000), standbys=0)
    with RunningJob(wanted, tmp_path / "first") as job:
        job.wait_for_step(5)
        agent = victims.machine_file(job.directory, "m1").agent_pid
        victims.send(agent, signal.SIGTERM)
        job.wait_for(lambda: steps_of(tmp_path), "a checkpoint of all ranks", 20.0)
        job.wait_for(lambda: not alive(agent), "the agent has gone", 20.0)
        job.signal(signal.SIGINT)
        job.wait_for(lambda: "stopping (boundary)" in job.tail(), "the first one is heard", 20.0)
        job.signal(signal.SIGINT)
        result = job.wait_until_done(45.0)
        job.assert_no_leftovers()
    assert result.code in (exits.STOPPED_BY_OPERATOR, exits.SUSPENDED), result.output


def alive(pid: int) -> bool:
    """Whether the process runs."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
