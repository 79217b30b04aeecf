"""`trainmover phases`: the points at which a drill can strike, from the code."""

from __future__ import annotations

import msgspec
import typer

from trainmover.cli import operator
from trainmover.protocol.phases import PHASES


def phases(as_json: operator.JsonOption = False) -> None:
    """Print every named phase, in order, with the processes that pass it."""
    if as_json:
        operator.print_json(msgspec.to_builtins(PHASES))
        return
    for phase in PHASES:
        typer.echo(f"{phase.name:<22} {'/'.join(phase.kinds):<18} {', '.join(phase.passed_by)}")
        typer.echo(f"    {phase.text}")
