"""What a drill tells a script that pauses in its steps: when it need not, and how far it may run.

The first part is the harness's side, the second one that of scripts.

Marks in the job's folder; a script that does not look for them is none the worse. So a job that
somebody still acts on does not end before, however slow the machine is, and no time is lost once
nobody does. Not here: how long a script pauses.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from trainmover.edges import faults

MARKS: Final = "faults"
HURRY: Final = "hurry"
"""Among the marks: nothing more is done to this job, so a script need not pause any more."""
PASSABLE: Final = "passable"
"""Beside them: the step from which on a script makes long pauses; empty: it may run to its end."""


# --------------------------------------------------------------------------- the harness's side


def let_hurry(folder: Path) -> None:
    """Scripts that pause in each step leave that out."""
    let_pass(folder)
    (folder / MARKS / HURRY).touch()


def let_pass(folder: Path, step: int | None = None) -> None:
    """Scripts that linger near their end go on as usual: up to `step`, or to the end."""
    made = folder / f"{PASSABLE}.new"
    made.write_text("" if step is None else str(step))
    made.replace(folder / PASSABLE)


# --------------------------------------------------------------------------- the script's side


def is_hurried() -> bool:
    """Whether a script leaves out its pauses; False where no harness has started it."""
    marks = _marks()
    return marks is not None and (marks / HURRY).exists()


def is_passable(step: int) -> bool:
    """Whether a script need not linger at `step`; True where no harness has started it."""
    marks = _marks()
    if marks is None:
        return True
    try:
        text = (marks.parent / PASSABLE).read_text()
    except FileNotFoundError:
        return False
    return not text or step < int(text)


def _marks() -> Path | None:
    told = os.environ.get(faults.MARKS_VARIABLE)
    return Path(told) if told else None
