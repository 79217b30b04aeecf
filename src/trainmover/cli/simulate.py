"""`trainmover simulate`: the real deciders in a seeded world of faults."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmover.errors import ConfigError


def simulate(
    seeds: Annotated[int, typer.Option(help="how many")] = 100,
    first: Annotated[int, typer.Option(help="the first seed")] = 0,
) -> int:
    """Run seeds; prints one line per failure that reproduces it, and ends with 1."""
    from trainmover.simulation import runner

    if seeds < 1:
        raise ConfigError(f"--seeds: expected at least 1, got {seeds}")
    summary = runner.run(seeds, first)
    typer.echo(str(summary))
    return 1 if summary.failures else 0
