"""`trainmover controller`: the process that decides for one job."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Annotated

import typer

from trainmover.cli.grace import TopologyOption, read_labels
from trainmover.cli.run import check_counts, choose_directory, resolve_settings
from trainmover.daemons import controller_daemon
from trainmover.daemons import settings as settings_of
from trainmover.daemons.options import ControllerOptions
from trainmover.daemons.run_directory import RunDirectory
from trainmover.edges import seal
from trainmover.errors import ConfigError
from trainmover.protocol.messages import JobSpec

CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def controller(
    script: Annotated[Path, typer.Argument(help="training script, at this path on all machines")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments of the script")] = None,
    machines: Annotated[int, typer.Option(help="machines that play ranks")] = 1,
    standby: Annotated[int, typer.Option(help="standbys to wait for at the start")] = 0,
    nproc_per_node: Annotated[
        int, typer.Option("--nproc-per-node", help="workers per machine")
    ] = 1,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any")] = 0,
    config: Annotated[Path | None, typer.Option(help="settings, a TOML file")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="one setting: owner.field=value")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="journal and records; reused to restart")
    ] = None,
    job: Annotated[str, typer.Option(help="name of the job")] = "",
    topology: TopologyOption = None,
    token_file: Annotated[Path | None, typer.Option(help="the job's token; made if absent")] = None,
) -> int:
    """Run the controller of a job until it has ended; start it again with the same --run-dir."""
    check_counts(machines=machines, standby=standby, nproc_per_node=nproc_per_node)
    settings = resolve_settings(config, assignments or [], -1, nproc_per_node)
    directory = RunDirectory(run_dir.resolve()) if run_dir else choose_directory(script, job, None)
    directory.create()
    provide_token(directory, token_file)
    name = job or directory.path.name
    spec = JobSpec(
        job=name,
        run_id=f"{name}-{uuid.uuid4().hex[:12]}",
        script=str(script.resolve()),
        arguments=tuple(arguments or ()),
        world_size=machines * nproc_per_node,
        workers_per_machine=nproc_per_node,
        settings=settings_of.flatten(settings),
        working_directory=os.getcwd(),
    )
    typer.echo(f"job {name}: files and token in {directory.path}", err=True)
    return controller_daemon.serve(
        ControllerOptions(
            run_directory=str(directory.path),
            spec=spec,
            machines=machines,
            standbys=standby,
            host=host,
            port=port,
            topology=read_labels(topology),
        )
    )


def provide_token(directory: RunDirectory, token_file: Path | None) -> None:
    """Put the job's token where the daemon reads it. Raises ConfigError."""
    told = os.environ.get(seal.TOKEN_VARIABLE, "")
    if token_file is not None:
        token = seal.read_token(token_file)
    elif told:
        token = told
    elif directory.token.exists():
        return
    else:
        token = seal.new_token()
    if len(token) < seal.MIN_TOKEN_LENGTH:
        raise ConfigError(f"expected a token of at least {seal.MIN_TOKEN_LENGTH} characters")
    seal.write_token(directory.token, token)
