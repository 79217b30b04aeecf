"""`run` as under torchrun, one command per host (here: two on one), and the daemons by hand."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainmover.edges.seal import new_token, write_token
from trainmover.protocol import exits

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("play.py"))


def start(tmp_path: Path, *arguments: str, token: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "TRAINMOVER_TOKEN": token,
        "TRAINMOVER_JOBS": str(tmp_path),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "trainmover.cli", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    """Below those that the kernel gives out by itself: nobody gets it before the controller does,
    and no agent that tries to reach it meets itself."""
    ports = list(range(20_000, 30_000))
    random.shuffle(ports)
    for port in ports:
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no port is free")


@pytest.mark.slow
def test_hosts_that_were_told_different_sizes_are_told_so(tmp_path: Path) -> None:
    token, endpoint = new_token(), f"127.0.0.1:{free_port()}"
    common = ("run", "--rdzv-endpoint", endpoint)
    first = start(tmp_path, *common, "--nnodes", "2", "--node-rank", "0", SCRIPT, token=token)
    other = start(tmp_path, *common, "--nnodes", "3", "--node-rank", "1", SCRIPT, token=token)
    try:
        text, _ = other.communicate(timeout=100)
        assert other.returncode == exits.BAD_USAGE, text
        assert "--nnodes 3, the controller's with 2" in text
        assert "Traceback" not in text
    finally:
        first.terminate()
        first.communicate(timeout=60)


IPV6_JOB = """
import torch, trainmover

def main(job):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.seed(1)
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(3):
        with step:
            loss = model(torch.randn(2, 3)).sum()
            loss.backward()
            optimizer.step()
            step.log(loss=loss.detach())

trainmover.run(main)
"""


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_two_hosts_meet_at_an_ipv6_address(tmp_path: Path) -> None:
    """Controller, links and channels: all on [::1]."""
    if not has_ipv6():
        pytest.skip("not shown: this machine has no IPv6 loopback")
    script = tmp_path / "job.py"
    script.write_text(IPV6_JOB)
    token, endpoint = new_token(), f"[::1]:{free_port()}"
    common = ("run", "--rdzv-endpoint", endpoint, "--nnodes", "2")
    hosts = [
        start(
            tmp_path / f"host{rank}",
            *(*common, "--node-rank", str(rank), "--run-dir", str(tmp_path / f"run{rank}")),
            str(script),
            token=token,
        )
        for rank in range(2)
    ]
    try:
        texts = [host.communicate(timeout=100)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], texts
    logs = [path.read_text() for path in tmp_path.glob("run*/logs/**/*") if path.is_file()]
    assert not any("127.0.0.1" in text for text in logs)


@pytest.mark.slow
def test_an_agent_with_a_wrong_token_ends_with_one_line(tmp_path: Path) -> None:
    token, port = new_token(), free_port()
    controller = start(tmp_path, "controller", "--port", str(port), SCRIPT, token=token)
    write_token(tmp_path / "other", new_token())
    agent = start(
        tmp_path,
        "agent",
        "--controller",
        f"127.0.0.1:{port}",
        "--token-file",
        str(tmp_path / "other"),
        "--machine",
        "m0",
        token=token,
    )
    try:
        text, _ = agent.communicate(timeout=100)
        assert agent.returncode == exits.BAD_USAGE, text
        assert "does not accept this agent's token" in text
        assert "Traceback" not in text
    finally:
        controller.terminate()
        controller.communicate(timeout=60)
