"""An example with a pause in each step: `paced.py train_gpt --steps 200 ...`.

On a fast machine the examples' small jobs would be over before a standby is ready. PACED_PAUSE_S
is the pause (longer towards the end, see `pace`); PACED_UNTIL a file that ends it, as the harness
does once nothing more is done to the job; PACED_SLOW one that makes it long while it is there.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2] / "process" / "scripts"))

from pace import pause

import trainmover

PAUSE_S = float(os.environ.get("PACED_PAUSE_S", "0.05"))
UNTIL = Path(os.environ.get("PACED_UNTIL", "/nonexistent"))
SLOW = Path(os.environ.get("PACED_SLOW", "/nonexistent"))
SLOW_S = 1.0


def main(job: trainmover.Job) -> None:
    example: Any = importlib.import_module(sys.argv[1])
    steps = job.steps

    def paced(total: int) -> Iterator[Any]:
        for step in steps(total):
            if not UNTIL.exists():
                pause(step.index, total, SLOW_S if SLOW.exists() else PAUSE_S)
            yield step

    job.steps = paced  # type: ignore[method-assign]
    example.train(job, example.parse_arguments(sys.argv[2:]))


if __name__ == "__main__":
    trainmover.run(main)
