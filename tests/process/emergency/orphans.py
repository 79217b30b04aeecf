"""The toy, after leaving an orphan behind that dies a little later: who buries it?"""

from __future__ import annotations

import os
import time

import trainmover
from tests.cases import toy


def leave_an_orphan() -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if os.fork() == 0:
        time.sleep(0.5)
    os._exit(0)


def main(job: trainmover.Job) -> None:
    if not job.is_shadow:
        leave_an_orphan()
    toy.main(job)


if __name__ == "__main__":
    trainmover.run(main)
