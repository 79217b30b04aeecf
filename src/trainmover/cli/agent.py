"""`trainmover agent`: one machine's part in a job."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from trainmover.cli import operator
from trainmover.cli.grace import GraceOption, end_of_allocation_s, grace_text
from trainmover.cli.run import resolve_settings
from trainmover.daemons import agent_daemon
from trainmover.daemons import settings as settings_of
from trainmover.daemons.grace import SETTING
from trainmover.daemons.options import AgentOptions
from trainmover.daemons.run_directory import RunDirectory, base_directory
from trainmover.edges import probes, seal
from trainmover.protocol.addresses import parse_address
from trainmover.topology.domains import labels_of, parse_topology


def agent(
    controller: Annotated[str, typer.Option(help="HOST:PORT of the job's controller")],
    machine: Annotated[str, typer.Option(help="name of this machine; default: the host's")] = "",
    host: Annotated[str, typer.Option(help="address its workers listen on")] = "",
    run_dir: Annotated[Path | None, typer.Option(help="logs; the same after a restart")] = None,
    config: Annotated[Path | None, typer.Option(help="settings, a TOML file")] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="one setting: owner.field=value")
    ] = None,
    script: Annotated[str, typer.Option(help="script to compare with other machines'")] = "",
    grace: GraceOption = "",
    labels: Annotated[
        list[str] | None, typer.Option("--label", help="rack=NAME, switch=NAME or power=NAME")
    ] = None,
    token_file: operator.TokenOption = None,
) -> int:
    """Register this machine and run its workers until the job has ended or it has left."""
    name = machine or socket.gethostname()
    target, port = parse_address(controller)
    usual = grace_text(grace)
    given = ([f"{SETTING}={usual}"] if usual else []) + (assignments or [])
    settings = resolve_settings(config, given, -1, 1)
    path = run_dir or base_directory() / f"agent-{name}"
    directory = RunDirectory(path.resolve())
    directory.create()
    seal.write_token(directory.token, operator.token_of(token_file))
    return agent_daemon.serve(
        AgentOptions(
            machine=name,
            controller=controller,
            run_directory=str(directory.path),
            token_file=str(directory.token),
            host=probes.own_address(host or probes.address_that_reaches(target, port)),
            settings=settings_of.flatten(settings),
            script=script,
            labels=labels_of(parse_topology(" ".join([name, *labels]))[name]) if labels else (),
            ends_at_wall_s=end_of_allocation_s(),
        )
    )
