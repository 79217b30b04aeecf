"""The tiny job, paced (at last slowly) until a file appears; it notes each step behind its gate.

WATCHED_FOLDER in the environment switches both on; the undisturbed run has neither.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import tiny
import trainmover

FOLDER = os.environ.get("WATCHED_FOLDER", "")
PACE_S = 0.1
LAST_STEPS, LAST_PACE_S = 60, 1.0
"""However slow the machine is, it must not end before all that is done to it is over."""
STEPS = int(sys.argv[sys.argv.index("--steps") + 1])


class Watched(tiny.Deaths):
    """Called in each window of a step."""

    def __call__(self, window: str) -> None:
        if not FOLDER or self.job.is_shadow:
            return
        if window == "forward" and not (Path(FOLDER) / "fast").exists():
            time.sleep(PACE_S if self.step < STEPS - LAST_STEPS else LAST_PACE_S)
        if window == "scheduler":  # behind the gate: this process has applied the step
            with (Path(FOLDER) / f"witness-{os.getpid()}").open("a") as witness:
                witness.write(f"{self.step}\n")


if __name__ == "__main__":
    tiny.Deaths = Watched
    trainmover.run(tiny.main)
