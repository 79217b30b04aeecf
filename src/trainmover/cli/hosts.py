"""`trainmover run` as under torchrun: the same command on each host, one of which decides.

The host with --node-rank 0, or the one that owns the endpoint's address, runs the controller beside
its agent; every host runs one agent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from trainmover.cli.grace import end_of_allocation_s
from trainmover.cli.operator import token_of
from trainmover.daemons.options import AgentOptions, ControllerOptions
from trainmover.daemons.run_directory import (
    ControllerFile,
    OutcomeFile,
    RunDirectory,
    read_struct,
    write_struct,
)
from trainmover.edges import first_process, probes, seal
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import ConfigError, TrainMoverError
from trainmover.protocol.addresses import LOOPBACK, is_ipv6, joined
from trainmover.protocol.messages import JobSpec, SaveRequest
from trainmover.topology.keeping import read_keeping

START_LIMIT_S = 30.0
POLL_S = 0.1
LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One host's part of a job."""

    script: Path
    arguments: tuple[str, ...]
    node_count: int
    node_rank: int
    standbys: int
    workers_per_machine: int
    endpoint: tuple[str, int]
    directory: RunDirectory
    token_file: Path | None
    settings: tuple[tuple[str, str], ...]
    resume: str = "auto"
    topology: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


def owns_address(host: str) -> bool:
    """Whether `host` resolves to an address of this machine."""
    try:
        told = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"--rdzv-endpoint: {host} is no host: {error}") from error
    own = {address.address for group in psutil.net_if_addrs().values() for address in group}
    return bool(told & own)


def run_on_hosts(plan: HostPlan) -> int:
    """Run this host's agent, and the controller where it belongs; the exit code."""
    host, port = plan.endpoint
    if port == 0:
        raise ConfigError("--rdzv-endpoint: expected a port that all hosts know, got 0")
    decides = plan.node_rank == 0 or (plan.node_rank < 0 and owns_address(host))
    plan.directory.create()
    token = token_of(plan.token_file)
    seal.write_token(plan.directory.token, token)
    children = [_start_controller(plan)] if decides else []
    try:
        if decides:
            _wait_for_controller(plan, children[0])
        children.append(_start_agent(plan, "127.0.0.1" if host in ("localhost",) else host))
        return _wait(children, plan)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()


def _start_controller(plan: HostPlan) -> subprocess.Popen[bytes]:
    job = plan.directory.path.name
    spec = JobSpec(
        job=job,
        run_id=f"{job}-{uuid.uuid4().hex[:12]}",
        script=str(plan.script.resolve()),
        arguments=plan.arguments,
        world_size=plan.node_count * plan.workers_per_machine,
        workers_per_machine=plan.workers_per_machine,
        settings=plan.settings,
        working_directory=os.getcwd(),
        log_directory=str(plan.directory.logs),
    )
    options = ControllerOptions(
        run_directory=str(plan.directory.path),
        spec=spec,
        machines=plan.node_count,
        standbys=plan.standbys,
        host=_listening_host(plan.endpoint[0]),
        port=plan.endpoint[1],
        node_count=plan.node_count,
        is_embedded=True,
        resume=plan.resume,
        topology=plan.topology,
    )
    return _spawn("controller_daemon", options, plan.directory.path / "controller-options.json")


def _listening_host(host: str) -> str:
    """Where the controller listens: nowhere else than on this host if only that was meant."""
    if host in LOOPBACK:
        return "::1" if is_ipv6(host) else "127.0.0.1"
    return "::" if is_ipv6(host) else "0.0.0.0"


def _start_agent(plan: HostPlan, host: str) -> subprocess.Popen[bytes]:
    port = plan.endpoint[1]
    name = f"m{plan.node_rank}" if plan.node_rank >= 0 else socket.gethostname()
    options = AgentOptions(
        machine=name,
        controller=joined(host, port),
        run_directory=str(plan.directory.path),
        token_file=str(plan.directory.token),
        host=probes.address_that_reaches(host, port),
        settings=plan.settings,
        labels=(("nnodes", str(plan.node_count)),),
        script=str(plan.script.resolve()),
        is_embedded=True,
        ends_at_wall_s=end_of_allocation_s(),
    )
    return _spawn("agent_daemon", options, plan.directory.path / f"agent-{name}-options.json")


def _spawn(module: str, options: msgspec.Struct, path: Path) -> subprocess.Popen[bytes]:
    write_struct(path, options)
    command = [sys.executable, "-m", f"trainmover.daemons.{module}", str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _wait_for_controller(plan: HostPlan, child: subprocess.Popen[bytes]) -> None:
    checkpoint = read_keeping(plan.settings).checkpoint  # it may have to be read whole
    reading_s = checkpoint.load_timeout_s if checkpoint.is_on else 0.0
    deadline = time.monotonic() + START_LIMIT_S + reading_s
    while time.monotonic() < deadline:
        found = read_struct(plan.directory.path / "controller.json", ControllerFile)
        if found is not None and found.pid == child.pid:
            return
        if child.poll() is not None:
            raise ConfigError("the controller did not start; its message is above")
        time.sleep(POLL_S)
    raise ConfigError(f"the controller did not listen within {START_LIMIT_S:g} s")


def _wait_for(children: list[subprocess.Popen[bytes]], plan: HostPlan, saves: list[int]) -> int:
    """The agent's exit code; meanwhile checkpoints that signals asked for, and orphans."""
    while True:
        try:
            return children[-1].wait(timeout=LOOK_INTERVAL_S)
        except subprocess.TimeoutExpired:
            if saves:
                saves.clear()
                _ask_for_checkpoint(plan)
            if first_process.is_first():
                first_process.bury_orphans([child.pid for child in children])


def _ask_for_checkpoint(plan: HostPlan) -> None:
    host, port = plan.endpoint
    client = OperatorClient(host, port, seal.read_token(plan.directory.token), timeout_s=3.0)
    try:
        reply = client.request(SaveRequest(request=uuid.uuid4().hex[:12]))
        print(f"SIGUSR2: {reply.text}", file=sys.stderr)
    except TrainMoverError as error:
        print(f"SIGUSR2: no checkpoint could be asked for: {error}", file=sys.stderr)
    finally:
        client.close()


def _wait(children: list[subprocess.Popen[bytes]], plan: HostPlan) -> int:
    saves: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            saves.append(number)
            return
        for child in children[-1:]:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    code = _wait_for(children, plan, saves)
    if len(children) > 1:
        try:
            children[0].wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            print("the controller still serves other hosts; it is ended now", file=sys.stderr)
        outcome = read_struct(plan.directory.path / "outcome.json", OutcomeFile)
        if outcome is not None:
            print(json.dumps({"code": outcome.code, "reason": outcome.reason}), file=sys.stderr)
            return outcome.code
    return code
