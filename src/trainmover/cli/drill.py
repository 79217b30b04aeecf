"""`trainmover drill`: inject faults into real processes, and compare every number."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from trainmover.drills.phase_deaths import all_deaths, scenario_of
from trainmover.drills.runner import DrillJob, example_job, run_drill
from trainmover.drills.scenario import SCENARIOS, Scenario, scenario_named
from trainmover.errors import ConfigError, DrillFailed


def drill(
    name: Annotated[str | None, typer.Argument(help="scenario, or KIND-PHASE-VICTIM")] = None,
    does_list: Annotated[bool, typer.Option("--list", help="print all names")] = False,
    seed: Annotated[int, typer.Option(help="draws the victims")] = 1,
    steps: Annotated[int, typer.Option(help="steps of the example")] = 120,
    script: Annotated[Path | None, typer.Option(help="another script than the example")] = None,
    keep: Annotated[Path | None, typer.Option(help="folder for the runs' files")] = None,
) -> int:
    """Run one scenario and the same job undisturbed; exit 1 unless everything is as it must be."""
    if does_list or name is None:
        show_names()
        return 0
    scenario = find(name)
    job = DrillJob(script=script) if script is not None else example_job(steps)
    typer.echo(f"{scenario.name}: {scenario.text} Seed {seed}; this takes about a minute.")
    with tempfile.TemporaryDirectory(prefix="trainmover-drill-") as folder:
        try:
            found = run_drill(scenario, job, seed, keep or Path(folder))
        except DrillFailed as error:
            typer.echo(f"the undisturbed run failed: {error}", err=True)
            return 1
    typer.echo(found.sentence())
    return 0 if found.is_passed else 1


def find(name: str) -> Scenario:
    """The scenario of that name. Raises ConfigError."""
    found = scenario_named(name)
    if found is not None:
        return found
    for death in all_deaths():
        if death.name == name:
            return scenario_of(death)
    raise ConfigError(f"no drill '{name}'; trainmover drill --list prints them")


def show_names() -> None:
    """Scenarios with a line each, then the deaths at phases."""
    for scenario in SCENARIOS:
        typer.echo(f"{scenario.name:<22} {scenario.text}")
    typer.echo("\nDeaths at named phases (see trainmover phases):")
    for death in all_deaths():
        typer.echo(f"  {death.name}")
