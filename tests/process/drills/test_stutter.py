"""`tools/stutter.py` stops processes of this checkout for a moment, and ends as its command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
UNTIL_IT_GOES_ON = """
import signal, sys, threading
goes_on = threading.Event()
signal.signal(signal.SIGCONT, lambda *_: goes_on.set())
while not goes_on.wait(0.01):
    pass
sys.exit(7)
"""


def test_a_process_of_the_checkout_is_stopped_and_goes_on() -> None:
    # The test's own process may be chosen too: it loses a few tenths of a second.
    told = subprocess.run(
        [
            *(sys.executable, "tools/stutter.py", "--every", "0.05", "--longest", "0.1"),
            *(sys.executable, "-c", UNTIL_IT_GOES_ON),
        ],
        check=False,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert told.returncode == 7, told.stderr
    assert told.stderr.startswith("stutter: --seed ")


def test_without_a_command_it_says_what_it_expects() -> None:
    told = subprocess.run(
        [sys.executable, "tools/stutter.py"],
        check=False,
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert told.returncode == 2
    assert "expected a command to run" in told.stderr
