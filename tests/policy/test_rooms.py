"""Which rooms start without torch: import-linter reads imports, this test runs them.

A package's `__init__` runs whenever one of its modules is imported, which a static look at the
import graph does not follow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
WITHOUT_TORCH = (
    "trainmover",
    "trainmover.errors",
    "trainmover.topology",
    "trainmover.protocol",
    "trainmover.controller.transition",
    "trainmover.agent.transition",
    "trainmover.worker.lifecycle",
    "trainmover.worker.events",
    "trainmover.checks",
    "trainmover.edges",
    "trainmover.daemons",
    "trainmover.simulation",
    "trainmover.drills",
    "trainmover.cli.app",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_room_starts_without_torch(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        "heavy = sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules))\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)\n"
    )
    environment = {"PYTHONPATH": str(SOURCE), "PATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, f"{module} {result.stderr.strip().splitlines()[-1:]}"


def test_every_room_has_a_header() -> None:
    """The docstring of a room says what it decides, so that the room map can be read in place."""
    packages = sorted(SOURCE.glob("trainmover/*/__init__.py"))
    silent = [str(p.parent.name) for p in packages if not p.read_text().lstrip().startswith('"""')]
    assert not silent, f"rooms without a docstring in __init__.py: {silent}"
