"""`trainmover stop`: end a job at the next boundary, or now."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from trainmover.cli import operator
from trainmover.cli.grace import GraceOption
from trainmover.daemons.grace import parse_grace
from trainmover.protocol.messages import StopRequest


def stop(
    now: Annotated[bool, typer.Option("--now", help="do not wait for the step's end")] = False,
    grace: GraceOption = "",
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
    controller: operator.ControllerOption = None,
    token_file: operator.TokenOption = None,
) -> int:
    """Stop the job; every rank has then done the same steps, unless --now is given."""
    left_s = parse_grace(grace, "--grace") if grace else 0.0
    client = operator.connect(job, run_dir, controller, token_file)
    request = StopRequest(
        request=uuid.uuid4().hex[:12], mode="now" if now else "boundary", grace_s=left_s
    )
    reply = client.request(request)
    client.close()
    typer.echo(reply.text, err=not reply.is_accepted)
    return 0 if reply.is_accepted else 1
