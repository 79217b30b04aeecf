"""What the docs say exists: pages are fresh, links lead somewhere, commands can be typed."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from trainmover.protocol import exits

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
FLAG = re.compile(r"--[a-z][a-z-]*")
HELP_OF_ALL = """
from trainmover.cli.app import COMMANDS, main
for name in COMMANDS:
    print("=== " + name, flush=True)
    main([name, "--help"])
"""


def commands() -> list[tuple[str, str]]:
    """Page and command of every `$ ` line in a console block."""
    found = []
    for page in PAGES:
        for block in FENCE.findall(page.read_text()):
            lines = [line[2:].strip() for line in block.splitlines() if line.startswith("$ ")]
            found += [(str(page.relative_to(ROOT)), line) for line in lines]
    for name in ("Makefile", ".ci/run"):
        for line in (ROOT / name).read_text().splitlines():
            if "$(BIN)/trainmover " in line:
                found.append((name, "trainmover " + line.split("$(BIN)/trainmover ")[1]))
            if line.startswith("make "):
                found.append((name, line))
    return found


@lru_cache(maxsize=1)
def help_texts() -> dict[str, str]:
    """Help of every subcommand that is installed."""
    result = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    parts = [part.split("\n", 1) for part in result.stdout.split("=== ")[1:]]
    return {name.strip(): text for name, text in parts if text.strip()}


@lru_cache(maxsize=1)
def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z]+):(?!=)", text, re.MULTILINE))


@pytest.mark.parametrize(("page", "command"), commands())
def test_command_can_be_typed(page: str, command: str) -> None:
    words = command.split()
    if words[0] == "make":
        target = next((word for word in words[1:] if "=" not in word), "help")
        assert target in make_targets(), f"{page}: make has no target {target}"
    elif words[0] == "trainmover":
        name = words[1]
        assert name in help_texts(), f"{page}: no subcommand {name}, there are {[*help_texts()]}"
        # Behind the script's name the flags are the script's own.
        ours = command.split(".py", maxsplit=1)[0]
        known = set(FLAG.findall(help_texts()[name]))
        missing = [flag for flag in FLAG.findall(ours) if flag not in known]
        assert not missing, f"{page}: trainmover {name} has no {missing}"
    else:
        assert words[0] in {"git", "cd", "."}, f"{page}: don't know how to check {command!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    dead = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not dead, f"{page.relative_to(ROOT)} links to {dead}"


def test_rendered_pages_are_fresh() -> None:
    command = [sys.executable, str(ROOT / "tools" / "render_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert documented == set(exits.REASONS), "correct the table in docs/operations.md"


def test_changelog_has_an_unreleased_part() -> None:
    assert "\n## Unreleased\n" in (ROOT / "CHANGELOG.md").read_text()


def test_minimal_example_stays_minimal() -> None:
    lines = (ROOT / "examples" / "train_minimal.py").read_text().splitlines()
    assert len(lines) <= 80, "shorten examples/train_minimal.py; it shows how little is needed"
