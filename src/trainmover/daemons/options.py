"""How the two daemons are started: options that travel as a JSON file or as command-line flags."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainmover.errors import ConfigError
from trainmover.protocol.messages import JobSpec


class ControllerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One controller process."""

    run_directory: str
    spec: JobSpec
    machines: int
    standbys: int
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port; a restarted controller takes the one it had."""
    node_count: int = 0
    """``--nnodes`` of the command; agents told another number are refused. 0: not said."""
    is_embedded: bool = False
    """Ends when its standard input is closed: whoever started it is gone."""
    resume: str = "auto"
    """What a new job starts from: see `daemons.resume`."""
    topology: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()
    """Labels by machine, as a topology file has them; an agent's own count more."""


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One agent process."""

    machine: str
    controller: str
    """HOST:PORT."""
    run_directory: str
    token_file: str
    host: str = "127.0.0.1"
    """Address that this machine's workers listen on."""
    runtime_directory: str = ""
    """For sockets and progress pages; empty: derived from the run directory."""
    settings: tuple[tuple[str, str], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    script: str = ""
    entry: str = ""
    """``module:function`` of a worker; empty: the training worker."""
    orphan_timeout_s: float = 60.0
    is_cold: bool = False
    is_nursery_provided: bool = False
    """The first nursery is started by whoever started the agent."""
    is_embedded: bool = False
    """Ends, with its workers, when its standard input is closed."""
    ends_at_wall_s: float = 0.0
    """When the scheduler ends the allocation, Unix time; 0: not known."""


def read_options(path: Path, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Options of one daemon. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"the options in {path} can't be read: {error}") from error
