"""What a drill tells a script that pauses in its steps: when it need not, and how far it may run.

Marks in the job's folder; a script that does not look for them is none the worse. So a job that
somebody still acts on does not end before, however slow the machine is, and no time is lost once
nobody does. Not here: how long a script pauses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MARKS: Final = "faults"
HURRY: Final = "hurry"
"""Among the marks: nothing more is done to this job, so a script need not pause any more."""
PASSABLE: Final = "passable"
"""Beside them: the step from which on a script makes long pauses; empty: it may run to its end."""


def let_hurry(folder: Path) -> None:
    """Scripts that pause in each step leave that out."""
    let_pass(folder)
    (folder / MARKS / HURRY).touch()


def let_pass(folder: Path, step: int | None = None) -> None:
    """Scripts that linger near their end go on as usual: up to `step`, or to the end."""
    made = folder / f"{PASSABLE}.new"
    made.write_text("" if step is None else str(step))
    made.replace(folder / PASSABLE)
