"""P5 and P7 across real machines' networks: a cable is cut, nobody is told.

The job goes on with the standby, found by its short time-outs; what was cut off is fenced when
it comes back, and has written nothing meanwhile.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import eventually
from trainmover.daemons.records import read_lines, read_losses
from trainmover.daemons.run_directory import MachineFile, OutcomeFile, RunDirectory, read_struct
from trainmover.drills.request import FOLDER_WORD, JobRequest
from trainmover.drills.runner import FINAL_ARGUMENTS
from trainmover.drills.undisturbed import run_undisturbed
from trainmover.edges.operator_client import OperatorClient
from trainmover.edges.seal import new_token, write_token
from trainmover.errors import TransportError
from trainmover.protocol import exits
from trainmover.protocol.journal import IncidentReport

from .lan import Lan

pytestmark = [pytest.mark.slow, pytest.mark.needs_root, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("watched.py")
PORT = 7411
SETTINGS = {
    "agent.heartbeat_interval_s": "0.3",
    "communicator.collective_timeout_s": "8",
    "communicator.keepalive_s": "1",
    "communicator.tcp_user_timeout_s": "2",
    "controller.link_grace_s": "0.3",
    "controller.lost_after_s": "6",
    "controller.report_timeout_s": "4",
    "controller.stopped_limit_s": "1.5",
}


class LanJob:
    """Controller at the switch, one agent per machine."""

    def __init__(
        self,
        lan: Lan,
        folder: Path,
        arguments: tuple[str, ...],
        settings: dict[str, str] | None = None,
    ) -> None:
        self.lan, self.folder = lan, folder
        self.settings = {**SETTINGS, **(settings or {})}
        self.directory = RunDirectory(folder / "controller")
        self.token = new_token()
        self.arguments = [word.replace(FOLDER_WORD, str(folder)) for word in arguments]
        self.client: OperatorClient | None = None
        write_token(folder / "token", self.token)

    def start_controller(self, machines: int, standbys: int) -> Any:
        words = self._words("controller", "--host", self.lan.controller, "--port", str(PORT))
        words += ["--machines", str(machines), "--standby", str(standbys)]
        words += ["--run-dir", str(self.directory.path), str(SCRIPT), *self.arguments]
        return self.lan.start(self.lan.switch, words, self.folder / "controller.txt")

    def start_agent(self, index: int, *more: str) -> Any:
        words = self._words("agent", "--controller", f"{self.lan.controller}:{PORT}", *more)
        words += ["--machine", f"m{index}", "--run-dir", str(self.folder / f"m{index}")]
        output = self.folder / f"m{index}.txt"
        name = self.lan.name(index)
        return self.lan.start(name, words, output, WATCHED_FOLDER=str(self.folder))

    def _words(self, command: str, *more: str) -> list[str]:
        words = [sys.executable, "-m", "trainmover.cli", command]
        words += ["--token-file", str(self.folder / "token"), *more]
        for name, value in self.settings.items():
            words += ["--set", f"{name}={value}"]
        return words

    def status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            try:
                if self.client is None:
                    self.client = OperatorClient(self.lan.controller, PORT, self.token)
                found: dict[str, Any] = self.client.get("status")["status"]
            except (TransportError, OSError):
                return {}
            return found

        return self.lan.inside(ask)

    def ready_standbys(self) -> list[str]:
        return [s["machine"] for s in self.status().get("standbys", ()) if s["is_ready"]]

    def machine_of(self, rank: int) -> str:
        ranks = self.status().get("ranks", ())
        return next((m["machine"] for m in ranks if m["rank"] == rank), "")

    def last_step(self) -> int:
        return max(read_losses(self.directory.path / "losses.jsonl"), default=-1)

    def worker_pids(self, machine: str) -> list[int]:
        path = RunDirectory(self.folder / machine).machine_file(machine)
        found = read_struct(path, MachineFile)
        return [] if found is None else [pid for _, pid in found.workers]

    def incidents(self) -> list[IncidentReport]:
        return list(read_lines(self.directory.path / "incidents.jsonl", IncidentReport))

    def witness(self, pid: int) -> list[int]:
        path = self.folder / f"witness-{pid}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def tail(self) -> str:
        return "\n".join(
            f"--- {path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.txt"))
        )


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lose(job: LanJob, rank: int, *, is_stopped: bool) -> None:
    """Cut off the machine of `rank`; the standby takes over in time; plug it in again."""
    standby = eventually(job.ready_standbys, "a standby is ready", timeout_s=60)[0]
    machine = eventually(lambda: job.machine_of(rank), f"who plays rank {rank}")
    (pid,) = job.worker_pids(machine)
    index, count = int(machine[1:]), len(job.incidents())
    before = job.last_step()
    if is_stopped:
        os.kill(pid, signal.SIGSTOP)
    struck_s = time.monotonic()
    job.lan.cut(index)
    # Far below the limits that nothing here has set: the cut itself was found.
    report = eventually(lambda: job.incidents()[count:], "the incident is closed", timeout_s=45)[0]
    took_s = time.monotonic() - struck_s
    assert report.kind == "standby", report
    eventually(lambda: job.last_step() >= report.resumed_step + 8, "training goes on")
    print(f"{machine} cut off behind step {before}: incident closed after {took_s:.1f} s")
    assert job.machine_of(rank) == standby
    if is_stopped:
        os.kill(pid, signal.SIGCONT)  # wakes up where it can ask nobody
        time.sleep(1.0)
    job.lan.plug(index)
    eventually(lambda: not is_alive(pid), f"{machine}'s old worker ends", timeout_s=40)
    # P7: it applied no step beyond the one that its successor has begun with.
    last = max(job.witness(pid), default=-1)
    assert last <= report.resumed_step, f"the fenced worker went on to step {last}: {report}"
    assert len(job.incidents()) == count + 1


def test_a_cut_cable_costs_a_standby_and_no_number(tmp_path: Path) -> None:
    arguments = ("--steps", "400", "--sleep", "0", *FINAL_ARGUMENTS)
    wanted = JobRequest(script=SCRIPT, arguments=arguments, machines=2, limit_s=120.0)
    undisturbed = run_undisturbed(wanted, tmp_path / "undisturbed")
    folder = tmp_path / "lan"
    folder.mkdir()
    with Lan(3) as lan:
        job = LanJob(lan, folder, arguments)
        controller = job.start_controller(machines=2, standbys=1)
        agents = [job.start_agent(index) for index in range(3)]
        try:
            eventually(lambda: job.last_step() >= 10, "step 10", timeout_s=90)
            hosts = {m["host"] for m in job.status()["ranks"] if "host" in m}
            assert hosts <= {lan.address(index) for index in range(3)}
            lose(job, 1, is_stopped=False)
            lose(job, 0, is_stopped=True)
            (folder / "fast").touch()
            assert controller.wait(60) == 0
            for agent in agents:
                agent.wait(60)
        except Exception:
            print(job.tail())
            raise
    losses = read_losses(job.directory.path / "losses.jsonl")
    assert {step: record.values for step, record in losses.items()} == undisturbed.losses
    assert (folder / "final.json").read_bytes() == (
        tmp_path / "undisturbed" / "final.json"
    ).read_bytes()
    outcome = read_struct(job.directory.path / "outcome.json", OutcomeFile)
    assert outcome is not None
    assert outcome.code == 0


def test_c85_peers_are_reached_on_the_interface_that_host_names(tmp_path: Path) -> None:
    """The controller is reached over eth0, the other machine over eth1 only; IPv4 only."""
    arguments = ("--steps", "20", "--sleep", "0")
    with Lan(2, second=True) as lan:
        job = LanJob(lan, tmp_path, arguments)
        for index in range(2):
            lan.isolate(index)
        controller = job.start_controller(machines=2, standbys=0)
        for index in range(2):
            job.start_agent(index, "--host", lan.second_address(index))
        code = controller.wait(90)
        assert code == 0, job.tail()
    assert job.last_step() == 19


def test_c85_an_interface_that_does_not_reach_the_peer_is_named(tmp_path: Path) -> None:
    """As above without --host: the addresses on the way to the controller don't serve."""
    hasty = {"communicator.connect_timeout_s": "1.5", "communicator.handshake_timeout_s": "1"}
    with Lan(2, second=True) as lan:
        job = LanJob(lan, tmp_path, ("--steps", "20"), hasty)
        for index in range(2):
            lan.isolate(index)
        controller = job.start_controller(machines=2, standbys=0)
        agent, _ = (job.start_agent(index) for index in range(2))
        assert controller.wait(60) == exits.START_FAILED
        agent.wait(60)
        text = (tmp_path / "m0.txt").read_text()
        assert lan.address(0) in text, text
        assert lan.address(1) in text, text
        assert "--host" in text, text


def test_c85_an_address_that_is_not_this_machines_is_refused(tmp_path: Path) -> None:
    with Lan(1) as lan:
        job = LanJob(lan, tmp_path, ())
        agent = job.start_agent(0, "--host", "10.99.0.77")
        assert agent.wait(60) == exits.BAD_USAGE
        text = (tmp_path / "m0.txt").read_text()
        assert "10.99.0.77" in text
        assert f"{lan.address(0)} (eth0)" in text
        assert "Traceback" not in text
