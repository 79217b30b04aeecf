"""Real controller, agents and nurseries; workers with the real lifecycle and no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from tests.process.daemons.jobs import Job, job
from tests.waiting import eventually

from trainmover.daemons.processes import kill_machine, session_members
from trainmover.daemons.records import LossRecord
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import AuthenticationFailed
from trainmover.protocol import exits
from trainmover.protocol.messages import StopRequest, SwitchoverRequest

STEPS = 120


def switch(client: OperatorClient, *machines: str, to: tuple[str, ...] = ()) -> str:
    """Ask for a switchover and wait for its end; the last reply's text."""
    request = uuid.uuid4().hex
    reply = client.request(SwitchoverRequest(request=request, machines=machines, to=to))
    while reply.is_accepted and not reply.is_final:
        reply = client.final_reply(request, 30.0) or reply
    return reply.text if reply.is_accepted else f"refused: {reply.text}"


def press_again(running: Job) -> bool:
    """Another Ctrl-C; several that arrive at once count as one."""
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
    return running.process.poll() is not None


def assert_all_steps_once(losses: dict[int, LossRecord], steps: int) -> None:
    """At least `steps`; the job went on until the test was through."""
    assert list(losses) == list(range(len(losses)))
    assert len(losses) >= steps


def test_a_job_runs_to_its_end_and_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path / "j", STEPS, standbys=1) as running:
        code, text = running.end()
        assert code == 0, text
        assert_all_steps_once(running.losses(), STEPS)
        assert not running.directory.runtime.exists()
        for machine in ("m0", "m1"):
            log = (running.directory.logs / f"agent-{machine}.log").read_text()
            assert "ended with 0" in log


def test_planned_switchover_and_the_machine_comes_back_as_standby(tmp_path: Path) -> None:
    with job(tmp_path / "j", 400, standbys=1) as running:
        running.wait_for_standby()
        running.wait_for_step(10)
        text = switch(running.client(), "m0")
        assert "refused" not in text, text
        assert running.machine_of() == "m1"
        running.wait_for_standby()
        assert [s["machine"] for s in running.status()["standbys"]] == ["m0"]
        text = switch(running.client(), "m1", to=("m0",))
        assert running.machine_of() == "m0", text
        code, text = running.end()
        assert code == 0, text
        assert_all_steps_once(running.losses(), 400)


def test_a_killed_controller_comes_back_and_training_goes_on(tmp_path: Path) -> None:
    with job(tmp_path / "j", 300) as running:
        running.wait_for_step(10)
        before = running.controller()
        os.kill(before.pid, signal.SIGKILL)
        eventually(lambda: running.controller().pid != before.pid, "another controller")
        after = running.controller()
        assert (after.port, after.term) == (before.port, before.term + 1)
        code, text = running.end()
        assert code == 0, text
        # The toy sends each step's log once; what was sent meanwhile is the agent's to keep.
        assert max(running.losses()) >= 299
        generations = {record.lineage for record in running.losses().values()}
        assert generations == {1}


def test_a_killed_agent_is_replaced_and_adopts_its_workers(tmp_path: Path) -> None:
    with job(tmp_path / "j", 300) as running:
        running.wait_for_step(10)
        before = running.machine("m0")
        worker = dict(before.workers)
        os.kill(before.agent_pid, signal.SIGKILL)
        eventually(lambda: running.machine("m0").agent_pid != before.agent_pid, "another agent")
        assert running.machine("m0").nursery_pid == before.nursery_pid
        assert all(psutil.pid_exists(pid) for pid in worker.values())
        code, text = running.end()
        assert code == 0, text
        assert {record.lineage for record in running.losses().values()} == {1}


def test_an_agent_asked_to_stop_hands_its_rank_over(tmp_path: Path) -> None:
    with job(tmp_path / "j", 500, standbys=1) as running:
        running.wait_for_standby()
        running.wait_for_step(10)
        os.kill(running.machine("m0").agent_pid, signal.SIGTERM)
        eventually(lambda: running.machine_of() == "m1", "the rank is on m1", timeout_s=60)
        code, text = running.end()
        assert code == 0, text
        assert_all_steps_once(running.losses(), 500)


def test_every_signal_makes_an_agent_hand_over_and_the_others_stay(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    with job(tmp_path / "j", 100_000, standbys=len(numbers)) as running:
        running.wait_for_step(3)
        for place, number in enumerate(numbers):
            running.wait_for_standby()
            before = eventually(running.machine_of, "somebody plays the rank")
            os.kill(running.machine(before).agent_pid, number)
            eventually(
                lambda gone=before: running.machine_of() not in ("", gone),
                f"the rank has left {before} after {number.name} ({place})",
                timeout_s=60,
            )
        running.client().request(StopRequest(request="s", mode="boundary"))
        code, text = running.end()
        assert code == exits.STOPPED_BY_OPERATOR, text
        assert {record.lineage for record in running.losses().values()} >= {1, 2, 3, 4}


def test_workers_end_when_there_is_no_controller_for_too_long(tmp_path: Path) -> None:
    limits = {
        "agent.controller_timeout_s": 16.0,
        "agent.heartbeat_interval_s": 0.5,
        "controller.lost_after_s": 5.0,
        "controller.report_timeout_s": 4.0,
    }
    with job(tmp_path / "j", 100_000, settings=limits) as running:
        running.wait_for_step(10)
        os.kill(running.controller().pid, signal.SIGSTOP)  # not dead: nobody restarts it
        code, text = running.end(100.0)
        assert code == exits.CONTROLLER_LOST, text
        assert "no controller for 16 s" in text


def test_interrupt_once_stops_at_a_boundary(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000, standbys=1) as running:
        running.wait_for_step(10)
        running.process.send_signal(signal.SIGINT)
        code, text = running.end()
        assert code == exits.STOPPED_BY_OPERATOR, text


def test_interrupt_while_it_starts_ends_it(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000, machines=2) as running:
        eventually((running.directory.path / "controller.json").exists, "the controller listens")
        running.process.send_signal(signal.SIGINT)
        code, text = running.end()
        assert code == exits.STOPPED_BY_OPERATOR, text


def test_a_controller_killed_many_times_in_a_row_keeps_its_port(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000) as running:
        running.wait_for_step(3)
        port = running.controller().port
        for term in range(2, 7):
            os.kill(running.controller().pid, signal.SIGKILL)
            eventually(lambda term=term: running.controller().term == term, f"term {term}")
        assert running.controller().port == port
        running.wait_for_step(max(running.losses()) + 5)
        running.client().request(StopRequest(request="s", mode="boundary"))
        code, text = running.end()
        assert code == exits.STOPPED_BY_OPERATOR, text


def test_interrupt_twice_stops_now(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000) as running:
        running.wait_for_step(10)
        running.process.send_signal(signal.SIGINT)
        running.process.send_signal(signal.SIGINT)
        code, text = running.end()
        assert code == exits.STOPPED_BY_OPERATOR, text


def test_interrupt_three_times_kills_every_process(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000) as running:
        running.wait_for_step(10)
        os.kill(running.controller().pid, signal.SIGSTOP)
        eventually(lambda: press_again(running), "the supervisor has ended")
        code, text = running.end()
        assert code == exits.INTERRUPTED, text
        assert not running.directory.runtime.exists()


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000) as running:
        running.wait_for_step(10)
        machine, controller = running.machine("m0"), running.controller()
        running.process.kill()
        pids = [
            machine.agent_pid,
            machine.nursery_pid,
            controller.pid,
            *dict(machine.workers).values(),
        ]
        eventually(lambda: not any(map(psutil.pid_exists, pids)), "all are gone")
        eventually(lambda: not running.directory.runtime.exists(), "sockets are gone")


@pytest.mark.timeout(240)
def test_nothing_outlives_a_supervisor_killed_while_workers_warm_up(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000, standbys=1, is_cold=False) as running:
        eventually((running.directory.logs / "agent-m0.log").exists, "agents have started")
        pid = running.controller().pid
        running.process.kill()
        eventually(lambda: not psutil.pid_exists(pid), "the controller has ended")
        # Nurseries that no agent has reached yet end by themselves after `orphan_timeout_s` (60 s).
        gone = running.directory.runtime.exists
        eventually(lambda: not gone(), "sockets are gone", timeout_s=150.0)


def test_a_killed_machine_stays_dead_and_only_it(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with (
            job(tmp_path / "a", 100_000, standbys=1) as one,
            job(tmp_path / "b", 300) as other,
        ):
            one.wait_for_standby()
            one.wait_for_step(5)
            other.wait_for_step(5)
            nursery = one.machine("m1").nursery_pid
            assert kill_machine(one.directory, "m1")
            eventually(lambda: not session_members(nursery, 0), "the machine's tree is dead")
            before = max(one.losses())
            one.wait_for_step(before + 10)
            eventually(lambda: "machine m1 is gone" in one.text(), "it is told")
            assert other.end()[0] == 0
            assert stranger.poll() is None
            one.client().request(StopRequest(request="s", mode="boundary"))
            code, text = one.end()
            assert code == exits.STOPPED_BY_OPERATOR, text
    finally:
        stranger.kill()
        stranger.wait()


def test_refusals_are_one_clear_line_each(tmp_path: Path) -> None:
    with job(tmp_path / "j", 100_000, standbys=1) as running:
        running.wait_for_standby()
        running.wait_for_step(1)
        client = running.client()
        for machines, to, words in (
            (("m9",), (), "m9"),
            (("m1",), (), "m1"),
            (("m0",), ("m9",), "m9"),
            (("m0",), ("m0",), "m0"),
        ):
            text = switch(client, *machines, to=to)
            assert text.startswith("refused: "), (machines, to, text)
            assert words in text
            assert "\n" not in text
        at = running.controller()
        with pytest.raises(AuthenticationFailed, match="wrong token"):
            OperatorClient(at.host, at.port, "x" * 48).get("status")
        client.request(StopRequest(request="s", mode="now"))
        assert running.end()[0] == exits.STOPPED_BY_OPERATOR


def test_a_port_in_use_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        port = thief.getsockname()[1]
        with job(tmp_path / "j", 10, port=port) as running:
            code, text = running.end()
            assert code == exits.BAD_USAGE
            assert f"127.0.0.1 port {port}" in text
            assert f"pid {os.getpid()}" in text
            assert "Traceback" not in text


def test_a_run_directory_is_used_once(tmp_path: Path) -> None:
    with job(tmp_path / "j", 3) as running:
        assert running.end()[0] == 0
    with job(tmp_path / "j", 3) as running:
        code, text = running.end()
        assert code == exits.BAD_USAGE
        assert "holds the journal of an earlier job" in text
