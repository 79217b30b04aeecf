"""`run` as under torchrun, one command per host (here: two on one), and the daemons by hand."""

from __future__ import annotations

import os
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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
