"""`trainmover config`: all settings, as defaults or as a file and ``--set`` make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainmover.cli import operator
from trainmover.daemons import settings as settings_of


def config(
    file: Annotated[Path | None, typer.Argument(help="a TOML file to check and print")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="one setting: owner.field=value")
    ] = None,
    as_json: operator.JsonOption = False,
) -> None:
    """Print every setting as TOML; what is printed can be used with `run --config`."""
    settings = settings_of.resolve(
        settings_of.read_toml(file) if file is not None else {},
        settings_of.read_assignments(assignments or []),
    )
    if as_json:
        operator.print_json(settings)
        return
    section = ""
    for name, value in settings.items():
        owner, _, field = name.partition(".")
        if owner != section:
            typer.echo(f"{'' if not section else chr(10)}[{owner}]")
            section = owner
        typer.echo(f"{field} = {json.dumps(value)}")
