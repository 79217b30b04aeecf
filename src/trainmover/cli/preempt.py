"""`trainmover preempt`: say that machines are about to be taken away."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from trainmover.cli import operator
from trainmover.cli.grace import GraceOption
from trainmover.cli.switchover import show
from trainmover.daemons.grace import parse_grace
from trainmover.protocol.messages import PreemptionNotice


def preempt(
    machines: Annotated[list[str], typer.Argument(help="machines that are about to go")],
    grace: GraceOption = "",
    job: operator.JobOption = None,
    run_dir: operator.RunDirOption = None,
    controller: operator.ControllerOption = None,
    token_file: operator.TokenOption = None,
    as_json: operator.JsonOption = False,
) -> int:
    """Save what MACHINES hold and move their ranks, as far as the grace time allows."""
    left_s = parse_grace(grace, "--grace") if grace else 0.0
    client = operator.connect(job, run_dir, controller, token_file)
    notice = PreemptionNotice(
        request=uuid.uuid4().hex[:12], machines=tuple(machines), grace_s=left_s
    )
    reply = client.request(notice)
    client.close()
    show(reply, as_json=as_json)
    return 0 if reply.is_accepted else 1
