"""`trainmover demo`: lose two machines, and compare every number."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmover.drills.demo import DemoConfig, run_demo


def demo(
    output: Annotated[Path, typer.Option(help="folder for report.json and timeline.png")] = Path(
        "demo-report"
    ),
    steps: Annotated[int, typer.Option(help="steps to train", min=60)] = DemoConfig(
        folder=Path()
    ).steps,
    keep: Annotated[bool, typer.Option("--keep", help="keep journals and logs, too")] = False,
) -> int:
    """Train, switch one machine over, kill another, and prove that no number changed."""
    return run_demo(DemoConfig(folder=output, steps=steps, keeps_run=keep))
