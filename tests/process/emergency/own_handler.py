"""The toy with what many scripts have: a handler of SIGTERM that saves and leaves."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import trainmover
from tests.cases import toy


def leave(number: int, _: FrameType | None) -> None:
    print("the script's own handler", number, flush=True)
    sys.exit(3)


def main(job: trainmover.Job) -> None:
    signal.signal(signal.SIGTERM, leave)

    print("handler in place:", signal.getsignal(signal.SIGTERM) is leave, flush=True)
    toy.main(job)


if __name__ == "__main__":
    trainmover.run(main)
