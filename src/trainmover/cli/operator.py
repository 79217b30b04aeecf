"""How subcommands reach a running job: which one is meant, and a session with its controller."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmover.daemons.run_directory import ControllerFile, RunDirectory, find_job, read_struct
from trainmover.edges import seal
from trainmover.edges.operator_client import OperatorClient
from trainmover.errors import ConfigError
from trainmover.protocol.addresses import parse_address

JobOption = Annotated[
    str | None, typer.Option("--job", help="job to talk to; default: the only running one")
]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="run directory of the job to talk to")
]
ControllerOption = Annotated[
    str | None, typer.Option("--controller", help="HOST:PORT of a controller on another host")
]
TokenOption = Annotated[Path | None, typer.Option("--token-file", help="file with the job's token")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


def token_of(token_file: Path | None, directory: RunDirectory | None = None) -> str:
    """The job's token: from the file told, the environment, or the run directory."""
    if token_file is not None:
        return seal.read_token(token_file)
    told = os.environ.get(seal.TOKEN_VARIABLE, "")
    if told:
        if len(told) < seal.MIN_TOKEN_LENGTH:
            raise ConfigError(
                f"{seal.TOKEN_VARIABLE} holds {len(told)} characters, "
                f"expected at least {seal.MIN_TOKEN_LENGTH}"
            )
        return told
    if directory is not None:
        return seal.read_token(directory.token)
    raise ConfigError(
        f"the job's token is needed: name its file with --token-file, or set {seal.TOKEN_VARIABLE}"
    )


def connect(
    job: str | None, run_dir: Path | None, controller: str | None, token_file: Path | None
) -> OperatorClient:
    """A session with the controller that is meant. Raises ConfigError."""
    if controller is not None:
        host, port = parse_address(controller)
        return OperatorClient(host, port, token_of(token_file))
    directory = find_job(job, run_dir)
    found = read_struct(directory.path / "controller.json", ControllerFile)
    if found is None:
        raise ConfigError(f"the controller of {directory.path.name} has not started yet")
    token = seal.read_token(token_file) if token_file else seal.read_token(directory.token)
    return OperatorClient(found.host, found.port, token)


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    print(json.dumps(value, indent=2))
