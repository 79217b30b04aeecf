"""`trainmover logs`: what workers printed, merged with a prefix."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmover.cli import operator
from trainmover.cli.worker_logs import log_names
from trainmover.daemons.run_directory import find_job
from trainmover.edges.launcher import log_tail

ALL_BYTES = 1 << 40


def logs(
    rank: Annotated[int | None, typer.Option(help="only this rank")] = None,
    generation: Annotated[int | None, typer.Option(help="only this generation")] = None,
    tail: Annotated[int, typer.Option(help="only the last lines of each; 0: all")] = 0,
    paths: Annotated[bool, typer.Option("--paths", help="print file names instead")] = False,
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
) -> int:
    """Output of every rank and generation; of processes without a rank, too, when none is named."""
    found = [
        name
        for name in log_names(find_job(job, run_dir).logs)
        if rank in (None, name.rank) and generation in (None, name.generation)
    ]
    for name in found:
        if paths:
            typer.echo(str(name.path))
            continue
        lines = log_tail(name.path, ALL_BYTES).splitlines()
        for line in lines[-tail:] if tail > 0 else lines:
            typer.echo(f"{name.prefix} {line}")
    return 0 if found else 1
