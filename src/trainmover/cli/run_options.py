"""Options of `trainmover run` that need more than a line."""

from __future__ import annotations

from typing import Annotated, Final

import typer

UNLIMITED: Final = -1

NprocPerNode = Annotated[
    int, typer.Option("--nproc-per-node", "--nproc_per_node", help="workers per machine")
]
Nnodes = Annotated[
    int, typer.Option(help="machines of the job when each is a host; with --rdzv-endpoint")
]
RdzvEndpoint = Annotated[
    str, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="controller's HOST:PORT")
]
NodeRank = Annotated[
    int,
    typer.Option("--node-rank", "--node_rank", help="this host's place; 0 has the controller"),
]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", "--max_restarts", help="incidents the job survives")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="one setting: owner.field=value")
]
JobName = Annotated[str, typer.Option(help="name of the job; default: the script's and a number")]
Checkpoints = Annotated[
    str, typer.Option(help="directory or URL of durable checkpoints, the same on all machines")
]
LocalCheckpoints = Annotated[
    str,
    typer.Option(
        help="directory on each machine's own disk: written there first, copied in the background"
    ),
]
Resume = Annotated[
    str, typer.Option(help="start from: auto (newest, if any), required, never, or a name")
]
RehearseWith = Annotated[
    str, typer.Option("--rehearse-with", help="standbys' answers: recorded, loopback or zeros")
]
RehearsalWrites = Annotated[
    str, typer.Option("--rehearsal-writes", help="what rehearsing scripts write: refuse, allow")
]
ShowsWorkerLogs = Annotated[bool, typer.Option("--worker-logs", help="show what workers print")]
