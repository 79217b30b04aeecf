"""Runs a command while processes of this checkout stand still at random: an unfair scheduler.

A test that assumes who comes first, or how much another process has done by now, fails here within
minutes, and once in a hundred runs elsewhere. Stops are shorter than the runtime takes for a fault,
so what fails is a race, of the test or of the product. Linux only. Processes that somebody else has
stopped are left alone.

Run: python tools/stutter.py [--every 0.5] [--longest 1.2] [--seed N] COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CHECKOUT = str(Path(__file__).resolve().parents[1])
AT_ONCE = 3
SHORT_SHARE = 0.3
SHORT_S = 0.05


class Stutter:
    """Stops one process after another, and lets each go on."""

    def __init__(self, every_s: float, longest_s: float, seed: int) -> None:
        self._every_s = every_s
        self._longest_s = longest_s
        self._draw = random.Random(seed)
        self._stopped: set[int] = set()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until `end`, on a thread of its own."""
        while not self._is_over.wait(self._draw.expovariate(1 / self._every_s)):
            found = [pid for pid in running() if pid not in self._stopped]
            if found and len(self._stopped) < AT_ONCE:
                is_short = self._draw.random() < SHORT_SHARE
                seconds = SHORT_S if is_short else self._draw.uniform(SHORT_S, self._longest_s)
                pid = self._draw.choice(found)
                threading.Thread(target=self._stop, args=(pid, seconds)).start()

    def _stop(self, pid: int, seconds: float) -> None:
        self._stopped.add(pid)
        if told(pid, signal.SIGSTOP):
            time.sleep(seconds)
            told(pid, signal.SIGCONT)
        self._stopped.discard(pid)

    def end(self) -> None:
        """Stop no more; who stands still goes on when its time is over."""
        self._is_over.set()


def told(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to get the signal."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def running() -> list[int]:
    """Processes that run this checkout's Python or files and have not been stopped."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            place = os.readlink(entry / "cwd")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has ended, or is another user's
        is_python = b"python" in command[0]
        is_ours = CHECKOUT in os.fsdecode(b" ".join(command)) or place.startswith(CHECKOUT)
        if is_python and is_ours and state not in "TtZ":
            found.append(int(entry.name))
    return sorted(found)


def main() -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=float, default=0.5, help="mean seconds between stops")
    parser.add_argument("--longest", type=float, default=1.2, help="seconds")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("expected a command to run, as: .venv/bin/python -m pytest tests/process")
    print(f"stutter: --seed {options.seed}", file=sys.stderr)
    signal.signal(signal.SIGINT, lambda *_: None)  # the command gets it too, and tidies up
    stutter = Stutter(options.every, options.longest, options.seed)
    thread = threading.Thread(target=stutter.run)
    thread.start()
    try:
        return subprocess.call(options.command)
    finally:
        stutter.end()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
