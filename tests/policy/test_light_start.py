"""Controller, agent and command line start without torch: a host that only decides needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROBE = """
import sys, importlib
importlib.import_module(sys.argv[1])
from trainmover.daemons import settings
settings.resolve({})
heavy = sorted({"torch", "numpy", "matplotlib"} & set(sys.modules))
sys.exit(f"{sys.argv[1]} imports {heavy}" if heavy else 0)
"""


@pytest.mark.parametrize(
    "module",
    [
        "trainmover",
        "trainmover.cli.run",
        "trainmover.cli.status",
        "trainmover.daemons.agent_daemon",
        "trainmover.daemons.controller_daemon",
        "trainmover.daemons.supervisor",
    ],
)
def test_nothing_heavy_is_imported(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, module],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
